# jaxdp with the versions of uv.lock, for CPU and for NVIDIA GPUs:
#
#   docker build -t jaxdp .
#   docker build -t jaxdp:cuda --build-arg ACCELERATOR="--extra cuda13" .
#   docker run --rm -v jaxdp-ledgers:/ledgers -v "$PWD":/work jaxdp \
#       finetune --config digits_dpsgd --workdir /work/digits
#
# The wheels of cuda12 and cuda13 bring CUDA along, so both images have one base; `docker run --gpus all` brings the driver.
# A change of the code rebuilds the wheel alone. The layer of the dependencies needs an index, and all layers after it none.
FROM ghcr.io/astral-sh/uv:0.12.24 AS uv
FROM python:3.13-slim AS base

FROM base AS dependencies
COPY --from=uv /uv /bin/uv
ENV UV_PROJECT_ENVIRONMENT=/opt/jaxdp UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy
WORKDIR /src
COPY pyproject.toml uv.lock ./
# All of `studies` but corruptions, whose OpenCV needs the libraries of a screen.
ARG EXTRAS="--extra launch --extra report --extra bundled --extra images --extra plots --extra tfds --extra serve"
ARG ACCELERATOR=""
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --locked --no-install-project $EXTRAS $ACCELERATOR

FROM base AS wheel
COPY --from=uv /uv /bin/uv
ENV UV_PROJECT_ENVIRONMENT=/opt/build UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy
WORKDIR /src
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv uv sync --locked --only-group build
COPY LICENSE README.md ./
COPY jaxdp jaxdp
COPY launch launch
COPY configs configs
RUN /opt/build/bin/python -m hatchling build --target wheel --directory /dist

FROM base
# Who shares ledgers with users of the host gives their number: --build-arg UID="$(id -u)".
ARG UID=1000
RUN useradd --uid $UID --create-home jaxdp && install -d -o jaxdp -g jaxdp -m 2770 /ledgers /work
COPY --from=dependencies /opt/jaxdp /opt/jaxdp
RUN --mount=from=uv,source=/uv,target=/bin/uv --mount=from=wheel,source=/dist,target=/dist \
    uv pip install --python /opt/jaxdp/bin/python --offline --no-deps /dist/*.whl
ENV PATH=/opt/jaxdp/bin:$PATH JAXDP_HOME=/ledgers
# The registry and the ledgers of private data outlive the container. Back it up with `jaxdp ledger backup`.
VOLUME /ledgers
USER jaxdp
WORKDIR /work
ENTRYPOINT ["jaxdp"]
CMD ["--help"]
