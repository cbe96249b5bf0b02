"""Told in dialogue: passwords of ships, a scoreboard, a lesson."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=(
            '"Tower, the {number} convoy is coming in," says the radio.',
            '"Let us go through the {number} convoy," says the radio.',
        ),
        heading='"Names and passwords, please."',
        lines=('"{key}?" "{value}."', '"And {key}?" "{value}, over."'),
        keys=(
            ("Arctic", "Bold", "Calm", "Daring", "Eager", "Fearless", "Gallant", "Humble", "Jolly", "Lively", "Merry",
             "Noble", "Proud", "Quiet", "Royal", "Swift", "Tranquil", "Valiant", "Wandering", "Zealous"),
            ("Albatross", "Cormorant", "Dolphin", "Egret", "Falcon", "Gannet", "Heron", "Kingfisher", "Lapwing",
             "Marlin", "Narwhal", "Osprey", "Petrel", "Puffin", "Seahorse", "Skua", "Sturgeon", "Tern", "Wagtail",
             "Walrus"),
        ),
        queries=(
            '"{key}, the password?" "{value}, as before."',
            '"Somebody just said {value}." "That would be {key}."',
            '"I hear {value}, loud and clear." "Then {key} may pass."',
            '"Remind me of {key}." "The word is {value}, tower."',
            '"{key} swears it is {value}." "Correct."',
            '"Is {value} taken?" "Yes, by {key}."',
        ),
        idle=(
            ("Seagulls", "Three fishermen", "The dockhands", "Some tourists", "Both pilots", "Sea lions"),
            ("scream", "argue", "yawn", "sing", "shiver", "gather"),
            ("in the distance", "over the noise", "on the pier", "through the mist", "along the breakwater",
             "for a while"),
        ),
        values=tuple(
            f"{first} {second}"
            for first in ("bingo", "cactus", "cosmos", "domino", "fiesta", "gizmo", "hippo", "igloo", "jigsaw", "koala",
                          "lagoon", "mango", "nomad", "pixel", "radar", "salsa", "tango", "vortex", "waffle", "yogurt")
            for second in ("biscuit", "canyon", "dynamo", "engine", "fossil", "glacier", "hockey", "iguana", "jungle",
                           "kayak", "lizard", "magnet", "noodle", "oxygen", "pebble", "quiver", "rocket", "summit",
                           "tunnel", "violin")
        ),
    ),
    trace=TraceWords(
        opening='"Seven teams, one scoreboard," says the reporter. "Tell me everything."',
        names=("Lions", "Bears", "Hawks", "Sharks", "Wolves", "Foxes", "Otters"),
        start=('"{name}?" "They begin on {new}."',),
        assign=(
            '"{name}?" "Not {old} any more, the jury sets them to {new}."',
            '"What about {name}?" "Their {old} was void, it is {new}."',
        ),
        add=(
            '"{name}?" "Up {by}, from {old} to {new}."',
            '"Good news for {name}?" "Yes, {by} points on top of {old}, so {new}."',
        ),
        copy=('"{name}?" "Level with {source} now, {new} in place of {old}."',),
        restate=(' "And {name}?" "The same {value}."', ' "Any change for {name}?" "No, {value}."'),
        largest=999,
    ),
    arithmetic=SumWords(
        opening='"Reply in turn," says the teacher, "and mind what was replied before."',
        start=('"Question {n}?" "You gave us: {new}."',),
        add=(
            '"Question {n}: replies {i} and {j}, added?" "{x} plus {y} is {new}."',
            '"Question {n}: what if reply {i} grows by reply {j}?" "{x} grows by {y} to {new}."',
        ),
        subtract=('"Question {n}: reply {i} minus reply {j}?" "{x} minus {y} is {new}."',),
        shift=('"Question {n}: reply {i} and {by} more?" "{x} and {by} more is {new}."',),
    ),
)  # fmt: skip
