"""Asks a Prometheus for every query of the dashboards and names those without data. Standard library only.

python3 deploy/grafana/check_panels.py http://127.0.0.1:9090 [RANGE]    # RANGE replaces $__rate_interval, 10m by default

Exit status: 0 every query has data, 1 some have none, 2 Prometheus refused one or does not answer.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path


def values(url: str, expr: str) -> list[float]:
    """What the query gives now, without NaN."""
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}", timeout=30) as answer:
        result = json.load(answer)["data"]["result"]
    return [value for one in result if not math.isnan(value := float(one["value"][1]))]


def main(url: str, interval: str = "10m") -> int:
    """Check all dashboards beside this file."""
    asked, empty = 0, 0
    for path in sorted((Path(__file__).parent / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                asked += 1
                try:
                    got = values(url, target["expr"].replace("$__rate_interval", interval).replace("$instance", ".*"))
                except (OSError, ValueError, KeyError) as error:
                    reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
                    print(f"{path.name}: {panel['title']}: {reason}", file=sys.stderr)
                    return 2
                if not got:
                    empty += 1
                    print(f"{path.name}: {panel['title']} ({target['legendFormat']}): no data")
    print(f"{asked} queries, {asked - empty} with data")
    return 1 if empty else 0


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
