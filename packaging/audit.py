"""An SBOM of what is deployed, and what is known against it.

Writes ``build/sbom.json`` (CycloneDX) and asks the advisory service through ``pip-audit``. A known
vulnerability ends it with 1. A service that cannot be reached, or does not know a package, is said
so and is no failure: then nothing is known, which is not the same as nothing being wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS = ROOT / "requirements" / "runtime.txt"


def main() -> int:
    (ROOT / "build").mkdir(exist_ok=True)
    bill = ROOT / "build" / "sbom.json"
    tool = [sys.executable, "-m", "cyclonedx_py", "requirements", str(PINS), "-o", str(bill)]
    subprocess.run(tool, check=True)
    print(f"{bill.relative_to(ROOT)}: {len(json.loads(bill.read_text())['components'])} components")
    tool = [sys.executable, "-m", "pip_audit", "-r", str(PINS), "--disable-pip", "--no-deps"]
    found = subprocess.run([*tool, "--format", "json"], capture_output=True, text=True)
    try:
        rows = json.loads(found.stdout)["dependencies"]
    except (ValueError, KeyError):
        words = found.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        print(f"NOT AUDITED: the advisory service could not be asked: {words[0][:300]}")
        return 0
    skipped = [row["name"] for row in rows if "skip_reason" in row]
    bad = [row for row in rows if row.get("vulns")]
    for row in bad:
        for each in row["vulns"]:
            print(f"{row['name']} {row['version']}: {each['id']}, fixed in {each['fix_versions']}")
    if skipped:
        print(f"NOT AUDITED, the advisory service does not know them: {', '.join(skipped)}")
    print(f"{len(rows) - len(skipped)} packages audited, {len(bad)} with known vulnerabilities")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
