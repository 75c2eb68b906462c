"""A ledger to damage, and all its answers about spends."""

from jaxdp.privacy import GaussianDpEvent, Ledger, PureDpEvent

TENTH = PureDpEvent(0.1)


def make(path, spends=12):
    """Makes a ledger with two datasets, several events, tokens, partitions and labels."""
    with Ledger(path, run="first") as ledger:
        ledger.register(
            "data", adjacency="add_remove", unit="example", epsilon=4.0, delta=0.0, records=1000
        )
        ledger.register("other", adjacency="replace_one", unit="patient", epsilon=8.0, delta=1e-5)
        for number in range(spends):
            with ledger.spend("data", TENTH, label=f"step {number}", token=f"token {number}"):
                pass
            if number % 3 == 0:
                with ledger.spend(
                    "other", GaussianDpEvent(10.0 + number), partition=f"part {number % 2}"
                ):
                    pass
        return answers(ledger)


def answers(ledger):
    """Returns all that a ledger says about spends."""
    report = ledger.report()
    said = {}
    for entry in report["datasets"]:
        name = entry["name"]
        said[name] = {
            "epsilon": ledger.epsilon(name),
            "remaining": ledger.remaining(name),
            "terms": [
                entry[key]
                for key in ("adjacency", "unit", "budget", "delta", "records", "accounting")
            ],
            "spends": [
                [row["partition"], row["description"], row["spends"]] for row in entry["spends"]
            ],
            "paid": [ledger.paid(name, f"token {number}") for number in range(15)],
        }
    return said
