"""Told: guests of a hotel in running text, children trading marbles, a bookkeeper's sums."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=(
            "On the {number} evening a coach drew up at the hotel.",
            "Then followed the {number} evening, and with it another coach.",
        ),
        heading="Every passenger needed a bed.",
        lines=("Suite {value} went to {key}.", "{key} was put up in {value}.", "They gave {value} to {key}."),
        keys=(
            ("Agnes", "Boris", "Clara", "Dmitri", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon",
             "Mabel", "Nadia", "Oscar", "Paula", "Quentin", "Rufus", "Selma", "Tobias"),
            ("Abbott", "Brandt", "Calloway", "Dupont", "Eriksen", "Fischer", "Gallagher", "Haddad", "Ibsen", "Jansen",
             "Kowalski", "Lindgren", "Moreau", "Novak", "Okafor", "Petrov", "Quinn", "Romano", "Sandoval", "Tanaka"),
        ),
        queries=(
            "The bellboy ran up to {value} with a suitcase belonging to {key}.",
            "A telegram arrived; {key} had it brought up to {value}.",
            "{key} rang down from {value} and ordered supper.",
            "When the alarm sounded, {key} was last to come out of {value}.",
            "Someone knocked at {value}, whereupon {key} opened.",
            "Breakfast, said {key}, should be sent to {value}.",
            "It was dark in {value}, since {key} had gone to the opera.",
        ),
        idle=(
            ("The pianist", "An elderly colonel", "The head waiter", "A bride", "The telephone operator",
             "A salesman from the south", "The chambermaid", "The governess"),
            ("complained about the soup", "hurried through a waltz", "wrote a sad letter", "won a game of dominoes",
             "asked when dinner would be served", "admired the chandelier", "closed all the windows",
             "invented a story about whales"),
            ("with a sigh", "to general applause", "until midnight", "as if in a dream",
             "in the winter garden", "next to the fountain", "in three languages", "on the terrace"),
        ),
        values=range(100, 1000),
        line_gap=" ",
    ),
    trace=TraceWords(
        opening="Nine children sit in the school yard and trade marbles.",
        names=("Rosa", "Ivan", "Mei", "Kofi", "Lena", "Omar", "Tess", "Yusuf", "Bela"),
        start=("{name} comes with {new} marbles.", "{name} has brought {new}."),
        assign=(
            "{name} trades all {old} marbles away and gets {new} in return.",
            "{name} swaps a whole bag of {old} for a bag of {new}.",
        ),
        add=("{name} had {old}, wins {by} and now owns {new}.", "With {by} more, {name} goes from {old} to {new}."),
        copy=(
            "{name} swaps {old} marbles so as to have what {source} has, that is {new}.",
            "{name} looks at the {new} of {source} and wants the same instead of {old}.",
        ),
        restate=(" {name} keeps {value}.", " {name} does not trade and has {value}."),
    ),
    arithmetic=SumWords(
        opening="The bookkeeper gives each of her sums a mark, so that she can build on it.",
        start=("Sum {n} is plainly {new}.",),
        add=(
            "Sum {n} is made of sum {i}, which was {x}, and sum {j}, which was {y}, so it is {new}.",
            "To get sum {n} she pours {x} (sum {i}) and {y} (sum {j}) into one heap of {new}.",
        ),
        subtract=(
            "Sum {n} is what remains of sum {i}, which was {x}, without the {y} of sum {j}: {new}.",
            "To get sum {n} she robs {x} (sum {i}) of {y} (sum {j}) and has {new}.",
        ),
        shift=(
            "Sum {n} is sum {i}, which was {x}, raised by {by} to {new}.",
            "To get sum {n} she lifts {x} (sum {i}) by {by}, up to {new}.",
        ),
    ),
)  # fmt: skip
