"""The words of the world: what there is, and the two words for each."""

from typing import NamedTuple

PEOPLE = (
    *(("william", "bill"), ("robert", "bob"), ("thomas", "tom"), ("edward", "ted"), ("michael", "mike")),
    *(("james", "jim"), ("joseph", "joe"), ("richard", "rick"), ("elizabeth", "liz"), ("margaret", "meg")),
    *(("katherine", "kate"), ("susan", "sue"), ("deborah", "debbie"), ("victoria", "vicky")),
    *(("patricia", "pat"), ("jessica", "jess")),
)
MEN = 8  # the first so many of PEOPLE
THINGS = (
    *(("car", "automobile"), ("boat", "ship"), ("bicycle", "bike"), ("lorry", "truck")),
    *(("coat", "jacket"), ("jumper", "sweater"), ("cap", "hat"), ("scarf", "shawl")),
    *(("cup", "mug"), ("bag", "sack"), ("bucket", "pail"), ("box", "crate")),
    *(("dog", "hound"), ("rabbit", "bunny"), ("pig", "hog"), ("hen", "chicken")),
    *(("sofa", "couch"), ("rug", "carpet"), ("lamp", "lantern"), ("wardrobe", "cupboard")),
)
KINDS = ("vehicle", "garment", "container", "animal", "furnishing")  # of four THINGS each
SIZES = (("big", "large"), ("small", "little"), ("huge", "enormous"), ("tiny", "minute"))
COLOURS = (
    *(("red", "crimson"), ("blue", "azure"), ("green", "emerald"), ("yellow", "golden")),
    *(("purple", "violet"), ("grey", "silver"), ("black", "ebony"), ("white", "ivory")),
)
PLACES = (
    *(("shop", "store"), ("garden", "yard"), ("harbour", "port"), ("forest", "wood")),
    *(("school", "academy"), ("hospital", "clinic"), ("station", "depot"), ("church", "chapel")),
)
TIMES = (
    *(("at dawn", "at sunrise"), ("at noon", "at midday"), ("at dusk", "at sunset"), ("at night", "at midnight")),
    *(("in spring", "in springtime"), ("in autumn", "in fall")),
    *(("in summer", "in midsummer"), ("in winter", "in midwinter")),
)


class Verb(NamedTuple):
    """A verb whose past tense and participle are one word."""

    infinitive: str
    past: str


# Action 2k is the opposite of action 2k + 1.
ACTIONS = (
    (Verb("buy", "bought"), Verb("purchase", "purchased")),
    (Verb("sell", "sold"), Verb("auction", "auctioned")),
    (Verb("find", "found"), Verb("discover", "discovered")),
    (Verb("lose", "lost"), Verb("misplace", "misplaced")),
    (Verb("mend", "mended"), Verb("repair", "repaired")),
    (Verb("damage", "damaged"), Verb("wreck", "wrecked")),
    (Verb("display", "displayed"), Verb("exhibit", "exhibited")),
    (Verb("conceal", "concealed"), Verb("cover", "covered")),
    (Verb("praise", "praised"), Verb("admire", "admired")),
    (Verb("criticise", "criticised"), Verb("mock", "mocked")),
    (Verb("clean", "cleaned"), Verb("wash", "washed")),
    (Verb("soil", "soiled"), Verb("stain", "stained")),
)

SLOTS = ("agent", "action", "thing", "size", "colour", "place", "time")
CORE, EXTRA = SLOTS[:3], SLOTS[3:]  # what every sentence about an event says, and what it may leave out
NAMES = {"agent": PEOPLE, "thing": THINGS, "size": SIZES, "colour": COLOURS, "place": PLACES, "time": TIMES}
SIZE = {"action": len(ACTIONS)} | {slot: len(names) for slot, names in NAMES.items()}
