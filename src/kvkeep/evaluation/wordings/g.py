"""Told in bullets, a chronicle and a ledger: deliveries to a kitchen, garrisons, accounts of a mill."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=("The {number} delivery has reached the kitchen.", "Now for the {number} delivery."),
        heading="Weighed on arrival, in grams:",
        lines=("* {value} g of {key}",),
        keys=(
            ("candied", "chopped", "crushed", "dried", "fresh", "frozen", "grated", "ground", "minced", "peeled",
             "pickled", "roasted", "salted", "shredded", "sliced", "smoked", "sour", "steamed", "sweet", "toasted"),
            ("apricots", "basil", "cherries", "chickpeas", "cinnamon", "coriander", "cumin", "fennel", "garlic",
             "ginger", "hazelnuts", "lentils", "mushrooms", "onions", "paprika", "peppers", "raisins", "sesame",
             "turnips", "walnuts"),
        ),
        queries=(
            "Stir in the {key}, all {value} grams at once.",
            "The cook weighs the {key} again: {value} grams, as it should be.",
            "Of {key} we bought {value} grams, remember.",
            "Since {value} grams of {key} are too much for a small pot, bring a large one.",
            "{value} grams, those were the {key}.",
            "Do not forget the {key} ({value} grams).",
        ),
        idle=(
            ("The dishwasher", "Our apprentice", "The sommelier", "A hungry critic", "The baker across the street",
             "The greengrocer"),
            ("burns a finger", "sneezes", "dances", "wipes the tiles", "drops a plate", "peeks into the oven"),
            ("in the pantry", "before noon", "by mistake", "twice", "over the sink", "as always", "out of boredom"),
        ),
        values=range(20, 2000, 3),
        sizes=(20, 28),
    ),
    trace=TraceWords(
        opening="A chronicle of six fortresses and the soldiers in them.",
        names=("Lisbon", "Bergen", "Cadiz", "Genoa", "Malta", "Rhodes"),
        start=("At first {new} soldiers guard {name}.",),
        assign=(
            "Day {n}. The {old} at {name} march off; a company of {new} relieves them.",
            "Day {n}. Fever strikes {name}: instead of {old} men, {new} show up at roll call.",
        ),
        add=("Day {n}. A boat lands {by} recruits at {name}, where {old} become {new}.",),
        copy=("Day {n}. {name} has to equal {source}: no more {old} soldiers but {new}.",),
        restate=(" {name} reports {value}.", " All quiet at {name}, garrison {value}."),
        largest=999,
    ),
    arithmetic=SumWords(
        opening="Ledger of the mill, in shillings, with a remark on where every amount is from",
        start=("No. {n:03}  {new:,} sh.  (from the iron chest)",),
        add=("No. {n:03}  {new:,} sh.  (No. {i:03} and No. {j:03} settled jointly, {x:,} with {y:,})",),
        subtract=("No. {n:03}  {new:,} sh.  (No. {i:03} after paying No. {j:03}, {x:,} reduced by {y:,})",),
        shift=("No. {n:03}  {new:,} sh.  (No. {i:03} with interest, {by} over {x:,})",),
        largest=9999,
    ),
)  # fmt: skip
