"""Formats of machines: JSON with logs of servers, JSON events, cells of a sheet."""

from kvkeep.evaluation.wordings.base import SumWords, TableWords, TraceWords, Wording

WORDING = Wording(
    table=TableWords(
        titles=("=== discovery, {number} cluster ===", "=== resync, {number} cluster ==="),
        heading='{"schema": ["host", "port"]}',
        lines=('{{"host": "{key}", "port": {value}}}',),
        keys=(
            ("auth", "billing", "cache", "cdn", "chat", "crm", "dns", "feed", "geo", "graph", "ingest", "jobs", "mail",
             "metrics", "oauth", "proxy", "queue", "search", "store", "vault"),
            ("accra", "berlin", "cairo", "dakar", "essen", "fresno", "geneva", "hanoi", "izmir", "jakarta", "kyoto",
             "lima", "madrid", "nairobi", "osaka", "porto", "quito", "riga", "seoul", "tunis"),
        ),
        queries=(
            "GET http://{key}:{value}/health OK",
            "connect {key} via :{value} ok",
            "ERROR {key} refused on port {value}, retrying",
            "tcp *:{value} LISTEN owner={key}",
            "upstream={key} port={value} weight=default;",
        ),
        idle=(
            ("DEBUG scheduler", "INFO janitor", "INFO balancer", "NOTICE certbot", "DEBUG collector", "TRACE watchdog"),
            ("woke up", "rotated logs", "flushed buffers", "saw no work", "emitted heartbeat", "reloaded config"),
            ("in foreground", "with defaults", "on signal", "at shutdown", "per policy", "via ipc"),
        ),
        values=range(1024, 65_536, 5),
        sizes=(10, 16),
        key_joint="-",
        sentence_gap="\n",
        idle_end="",
    ),
    trace=TraceWords(
        opening='{"stream": "gauges", "unit": "bar"}',
        names=("mercury", "venus", "mars", "jupiter", "saturn", "uranus", "neptune", "pluto", "ceres", "eris"),
        start=('{{"init": "{name}", "at": {new}}}',),
        assign=('{{"seq": {n}, "set": "{name}", "prev": {old}, "at": {new}}}',),
        add=('{{"seq": {n}, "inc": "{name}", "by": {by}, "prev": {old}, "at": {new}}}',),
        copy=('{{"seq": {n}, "clone": "{source}", "into": "{name}", "prev": {old}, "at": {new}}}',),
        restate=(' {{"idle": "{name}", "at": {value}}}',),
    ),
    arithmetic=SumWords(
        opening="cell,formula,operands,result",
        start=("C{n},const,,{new}",),
        add=("C{n},=C{i}+C{j},{x}+{y},{new}",),
        subtract=("C{n},=C{i}-C{j},{x}-{y},{new}",),
        shift=("C{n},=C{i}+{by},{x}+{by},{new}",),
    ),
)  # fmt: skip
