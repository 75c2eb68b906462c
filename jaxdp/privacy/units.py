"""The words for a unit of privacy: "patient", "device" and "hospital" need other sentences."""

import dataclasses

_PEOPLE = {
    *("person", "patient", "user", "client", "customer", "respondent", "participant", "subject"),
    *("individual", "citizen", "employee", "student", "pupil", "author", "speaker", "member"),
    *("donor", "child", "owner", "driver", "worker", "voter", "resident", "volunteer"),
}
_GROUPS = {
    *("hospital", "clinic", "practice", "ward", "household", "family", "company", "school"),
    *("bank", "site", "silo", "institution", "organization", "organisation", "department"),
    *("city", "village", "country", "region", "laboratory"),
}
_IRREGULAR = {"person": "people", "child": "children"}
# Neither people nor groups, but with several records each.
_OWNERS = {"account", "car", "day", "device", "machine", "phone", "sensor", "vehicle"}
# Endings of a word to which the plural adds -es.
_HISSING = ("s", "x", "z", "ch", "sh")


@dataclasses.dataclass(frozen=True)
class UnitWords:
    """A unit of privacy in the words of sentences.

    Attributes:
        one: One unit, such as "patient".
        many: Several units, such as "patients".
        is_person: Whether a unit is a person, with everything that the data set has about it.
        is_group: Whether a unit is a group of people, such as a hospital.
    """

    one: str
    many: str
    is_person: bool
    is_group: bool

    @property
    def beyond(self) -> str:
        """Whom the guarantee for one unit does not cover, as the subject of a sentence."""
        if self.is_person:
            return f"{self.a} who is in the data under two names"
        if self.is_group:
            return f"A person with records in several {self.many}"
        return f"A person with several {self.many}"

    @property
    def rows(self) -> str:
        """What an evaluation counts, as in "327 test records of patients".

        An owner, such as a patient or a device, may have several records. Other units are records.
        """
        noun = self.one.rpartition(" ")[2].lower()
        is_owner = self.is_person or self.is_group or noun in _OWNERS
        return f"records of {self.many}" if is_owner else self.many

    @property
    def a(self) -> str:
        """The unit with its article, as at the start of a sentence."""
        # "An hour" and "a user" are the exceptions that a unit is likely to meet.
        is_vowel = self.one[:1].lower() in "aeiou" and not self.one.lower().startswith(
            ("us", "uni")
        )
        return f"{'An' if is_vowel else 'A'} {self.one}"


def unit_words(unit: str) -> UnitWords:
    """Returns the words for a unit of privacy, as a data set was registered with it.

    A word that is not known is taken for a part of a person's data, such as "record", "image" or
    "device". Its plural is that of a regular English noun.

    Args:
        unit: For example "patient", "chest X-ray" or "hospital".
    """
    # The last word decides: "ward of a hospital" is rare, "cancer patient" is not.
    first, space, noun = unit.rpartition(" ")
    plural = _IRREGULAR.get(noun.lower()) or _regular(noun)
    return UnitWords(
        one=unit,
        many=f"{first}{space}{plural}",
        is_person=noun.lower() in _PEOPLE,
        is_group=noun.lower() in _GROUPS,
    )


def _regular(noun: str) -> str:
    """Returns the plural of a regular noun: "study" gives "studies", "box" gives "boxes"."""
    if noun.endswith("y") and noun[-2:-1] not in set("aeiou"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s"
