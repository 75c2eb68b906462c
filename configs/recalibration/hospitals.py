r"""Private recalibration between a calibrator and hospitals, each in a process of its own.

    python -m launch.recalibrate_server --config configs/recalibration/hospitals.py \
        --workdir workdir/calibrator \
        --exchange workdir/clinic-1,workdir/clinic-2 &
    python -m launch.recalibrate_client --config configs/recalibration/hospitals.py \
        --workdir workdir/hospital-1 \
        --exchange workdir/clinic-1 --config.client.records=clinic-1.npz &
    python -m launch.recalibrate_client --config configs/recalibration/hospitals.py \
        --workdir workdir/hospital-2 \
        --exchange workdir/clinic-2 --config.client.records=clinic-2.npz

--address and --keys in place of --exchange go over a network
(docs/howto/parties_over_a_network.md). All parties must have the same file, but for the part
`client`, which is each hospital's own, and the part `server`. """

from ml_collections import ConfigDict

from configs.people import PEOPLE


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # A kind of jaxdp.recalibration.METHODS, and its options.
            "method": {"kind": "acc_t", "iterations": 5, "bracket": (0.5, 20.0)},
            "epsilon": 1.0,  # of all answers of a hospital together, pure
            "adjacency": "add_remove",
            "num_classes": 5,
            # the number of hospitals that must answer every round. 0 is all.
            "server": {"fewest": 0},
            "client": {
                # an .npz file with logits [n, m] and labels [n], optionally group [n]; or a table,
                # a .csv file with a column for each logit, label, and optionally group
                "records": "",
                # their name on the hospital's ledger. "" is that of the file, without .npz.
                "dataset": "",
                "unit": "record",  # what one entry is, or what `group` has in common
                **PEOPLE,
            },
        }
    )
