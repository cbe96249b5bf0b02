"""Formats of machines: CSV with SQL, assembly, single static assignment."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=("-- import of the {number} batch into stock.csv", "-- stock.csv: append the {number} batch"),
        heading="sku,qty",
        lines=("{key},{value}",),
        keys=(
            ("acrylic", "bronze", "carbon", "ceramic", "chrome", "cobalt", "cork", "cotton", "epoxy", "felt", "kevlar",
             "nickel", "nylon", "quartz", "rubber", "steel", "teflon", "titanium", "vinyl", "zinc"),
            ("bearing", "bolt", "bracket", "clamp", "coupling", "dowel", "ferrule", "flange", "gasket", "grommet",
             "hinge", "nozzle", "piston", "pulley", "rivet", "spacer", "spring", "sprocket", "valve", "washer"),
        ),
        queries=(
            "SELECT qty FROM stock WHERE sku = '{key}'; -> {value}",
            "UPDATE orders SET qty = {value} WHERE sku = '{key}';",
            "INSERT INTO audit VALUES ('{key}', {value});",
            "CALL reserve({value}, '{key}');",
            "CHECK (stock['{key}'] = {value});",
        ),
        idle=(
            ("-- vacuum", "-- analyze", "-- reindex", "-- checkpoint", "-- replication", "-- backup"),
            ("skipped", "finished", "queued", "retried", "paused", "scheduled"),
            ("on primary", "on standby", "in background", "without errors", "after timeout", "by cron"),
        ),
        values=range(10_000, 100_000, 7),
        sizes=(14, 18),
        key_joint="_",
        sentence_gap="\n",
        idle_end=";",
    ),
    trace=TraceWords(
        opening="; listing with comments, all operands decimal",
        names=("ax", "bx", "cx", "dx", "si", "di", "bp", "sp"),
        start=(".word {name}, {new}",),
        assign=("{n:04x}: mov {name}, {new}  ; drops {old}",),
        add=("{n:04x}: add {name}, {by}  ; {old} -> {new}",),
        copy=("{n:04x}: mov {name}, {source}  ; {old} -> {new}",),
        restate=(" & {name} equals {value}",),
        largest=255,
    ),
    arithmetic=SumWords(
        opening="entry:  ; every comment evaluates its operands",
        start=("%{n} = const i32 {new}",),
        add=("%{n} = add i32 %{i}, %{j}  ; {x}, {y} => {new}",),
        subtract=("%{n} = sub i32 %{i}, %{j}  ; {x}, {y} => {new}",),
        shift=("%{n} = inc i32 %{i}, {by}  ; {x} => {new}",),
        largest=9999,
    ),
)  # fmt: skip
