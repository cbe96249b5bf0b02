"""A register of lost property, jars of beads, numbered lines. Measured on: see `kvkeep.evaluation.wordings`."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=("This is the {number} register of the lost property office.", "Here begins the {number} shelf list."),
        heading="Article: number",
        lines=("{key}: {value}",),
        keys=(
            ("amber", "brass", "copper", "crimson", "dusty", "empty", "faded", "green", "heavy", "ivory",
             "leather", "narrow", "oval", "painted", "purple", "rusty", "silver", "spotted", "striped", "tiny",
             "velvet", "wooden"),
            ("basket", "bell", "brush", "button", "candle", "clock", "drum", "flute", "glove", "hammer", "kettle",
             "ladder", "lantern", "mirror", "needle", "pillow", "ribbon", "saddle", "spoon", "trunk", "umbrella",
             "whistle"),
        ),
        queries=(
            "The clerk looked up the {key} and found {value} beside it.",
            "According to the register, the {key} carries the number {value}.",
            "Whoever asks for the {key} is told {value}.",
            "On the label tied to the {key} one reads {value}.",
            "A lady came about the {key}, and the answer was {value}.",
            "For the {key}, the number to write on the slip is {value}.",
            "Nobody had collected the {key}, so {value} stayed on the list.",
        ),
        idle=(
            ("The old clerk", "A young porter", "The night watchman", "A tired traveller", "The office cat",
             "One of the inspectors", "A boy with a cap", "The cleaner"),
            ("waited patiently", "hummed a slow tune", "counted nothing at all", "drank a cup of tea",
             "read the morning paper", "talked about the weather", "looked out at the rain", "fell asleep"),
            ("beside the counter", "near the front door", "under the stairs", "by the stove",
             "at the end of the corridor", "in the back room", "behind a pile of boxes", "on the long bench"),
        ),
    ),
    trace=TraceWords(
        opening="Eight jars stand on a shelf, each holding some beads.",
        names=("oak", "pine", "elm", "ash", "fig", "palm", "yew", "plum"),
        start=("The {name} jar holds {new}.",),
        assign=("Step {n}: the {name} jar is emptied of its {old} beads and filled with {new}.",),
        add=("Step {n}: {by} beads join the {old} in the {name} jar, which makes {new}.",),
        copy=("Step {n}: the {name} jar, so far {old}, is matched to the {source} jar and holds {new}.",),
        restate=(" There are still {value} in the {name} jar.",),
    ),
    arithmetic=SumWords(
        opening="We compute one number a line, and later lines use the results of earlier ones.",
        start=("Line {n} starts from {new}.",),
        add=("Line {n} takes {x} from line {i} and {y} from line {j}; together they are {new}.",),
        subtract=("Line {n} takes {x} from line {i} less {y} from line {j}, which leaves {new}.",),
        shift=("Line {n} takes {x} from line {i} and adds {by}, giving {new}.",),
    ),
)  # fmt: skip
