"""Whom to ask about private data: fields of `config.data` that the ledger and reports show."""

PEOPLE = {
    "owner": "",  # who is responsible for the data
    "purpose": "",  # what the data may be used for
    "contact": "",  # where to ask, for example an address
    "approver": "",  # who allowed the use
}
