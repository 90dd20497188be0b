"""Every word of the suite, in groups of words that can stand for each other."""

from suites.sentences.acceptability import plural
from suites.sentences.reviews import ASPECTS, BAD, DEGREES, GOOD, SUBJECTS
from suites.sentences.words import ACTIONS, COLOURS, KINDS, PEOPLE, PLACES, SIZES, THINGS, TIMES

LINKS = ("so", "and", "but")
"""Words that link a sentence to one that it follows from, adds to or contradicts: the order of inference's labels."""

_FUNCTION = (
    *("the", "a", "an", "this", "these", "one", "two", "some", "was", "were", "has", "have", "did", "not", "by", "at"),
    *("in", "it", "who", "whom", "which", "what", "when", "where", "how", "of", "that", "person", "place", "time"),
    *("size", "colour", "himself", "herself", "said", "although", "even", "though", *LINKS, ".", ",", "?"),
)


def word_groups() -> list[list[str]]:
    """Return all words; no word is in two groups, so that a group's members are told apart by meaning alone.

    Example:
        >>> word_groups()[0][:2]
        ['william', 'bill']
    """
    verbs = [verb for action in ACTIONS for verb in action]
    groups = [
        *([word for words in names for word in words] for names in (PEOPLE, THINGS, SIZES, COLOURS, PLACES)),
        [words.split()[1] for names in TIMES for words in names],
        [verb.infinitive for verb in verbs],
        [verb.past for verb in verbs],
        [plural(word) for words in THINGS for word in words],
        list(KINDS),
        [*BAD, *GOOD],
        list(ASPECTS),
        list(SUBJECTS),
    ]
    taken = {word for group in groups for word in group} | set(_FUNCTION)
    degrees = dict.fromkeys(word for degree in DEGREES for word in degree.split())
    return [*groups, [word for word in degrees if word not in taken], list(_FUNCTION)]
