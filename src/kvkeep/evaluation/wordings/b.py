"""A telephone directory, a trace of variables, a worked solution."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=("## Telephone directory, {number} floor", "## Dialling codes, {number} issue"),
        heading="| office | extension |",
        lines=("| {key} | {value} |",),
        keys=(
            ("Abbey", "Birch", "Castle", "Dover", "Elm", "Forest", "Garden", "Harbour", "Island", "Juniper", "King",
             "Lake", "Meadow", "Norfolk", "Orchard", "Priory", "Queen", "River", "Station", "Temple", "Union",
             "Willow"),
            ("Avenue", "Bridge", "Court", "Crescent", "Dock", "Gate", "Grove", "Hall", "House", "Lane", "Market",
             "Mews", "Parade", "Place", "Quay", "Road", "Row", "Square", "Street", "Terrace", "Walk", "Yard"),
        ),
        queries=(
            "To reach {key}, please dial {value}.",
            "Calls for {key} are put through on {value}.",
            "{value} is still what {key} answers to.",
            "If {key} does not pick up, try {value} once more.",
            "Yesterday {key} was rung twice, both times on {value}.",
            "Messages left at {value} go to the people in {key}.",
        ),
        idle=(
            ("Maintenance staff", "Our new colleagues", "Two electricians", "Several guests", "The postal service",
             "A delegation from abroad", "Students on a tour", "The canteen team"),
            ("will be moving furniture", "are expected to arrive", "had some trouble parking", "held a short meeting",
             "asked for better lighting", "will repaint the doors", "left a note of thanks", "took photographs"),
            ("early next week", "before the holidays", "after lunch", "during the fire drill", "despite the heat",
             "as soon as the lift works", "late in the evening", "without any hurry"),
        ),
    ),
    trace=TraceWords(
        opening="# trace of a run: all variables are integers",
        names=("alpha", "beta", "gamma", "delta", "kappa", "sigma", "theta", "omega"),
        start=("{name} = {new}",),
        assign=("[{n}] {name} := {new} (was {old})",),
        add=("[{n}] {name} := {old} + {by} = {new}",),
        copy=("[{n}] {name} := {source} = {new} (was {old})",),
        restate=("; unchanged: {name} == {value}",),
    ),
    arithmetic=SumWords(
        opening="Worked solution, all results in whole numbers",
        start=("({n}) given: {new}",),
        add=("({n}) = ({i}) + ({j}) = {x} + {y} = {new}",),
        subtract=("({n}) = ({i}) - ({j}) = {x} - {y} = {new}",),
        shift=("({n}) = ({i}) + {by} = {x} + {by} = {new}",),
    ),
)  # fmt: skip
