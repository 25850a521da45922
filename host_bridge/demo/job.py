"""The demo's job: a licence inventory of the Python environment it runs in.

What a model would write stands here as text: the cells of the root and of its
children. They run on real data in real kernels; only the words are scripted.
"""

import re

from ..harness.script import Reply, ToolUse, Transcript

__all__ = ("CHILDREN", "INVENTORY_FILE", "TASK", "licence_script")

CHILDREN = 3

INVENTORY_FILE = "inventory.json"
"""In the root's exports: what its last cell found, for programs."""

TASK = (
    "Make a licence inventory of the Python environment that you run in: how many "
    "distributions have which licence. Share the counting among three children, check "
    "their sum against your own list, and answer with a table."
)

_CHILD_TASK = "Count the licences in"

_COLLECT = f"""\
import importlib.metadata, json, os, pathlib

def licence_of(metadata):
    classifiers = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier") or []
                   if c.startswith("License ::")]
    text = metadata.get("License-Expression") or (classifiers or [""])[-1] or metadata.get("License")
    lines = (text or "").strip().splitlines()
    return lines[0] if lines and len(lines[0]) <= 40 else "unknown"

distributions = {{}}
for found in importlib.metadata.distributions():
    key = (found.metadata["Name"] or "unnamed", found.version)
    distributions.setdefault(key, licence_of(found.metadata))
names = sorted(distributions)

exports = pathlib.Path(os.environ["RLM_SESSION_DIR"]) / "exports"
handles = []
for number in range({CHILDREN}):
    piece = exports / f"piece-{{number}}.json"
    piece.write_text(json.dumps([[*name, distributions[name]] for name in names[number::{CHILDREN}]]))
    handles.append(await rlm(
        f"{_CHILD_TASK} {{piece}} and report the counts to your parent.", name=f"count-{{number}}"))
print(f"{{len(names)}} distributions, shared among {{', '.join(h.name for h in handles)}}")
"""

_COUNT = """\
import collections, json
rows = json.load(open({piece!r}))
counts = collections.Counter(licence for name, version, licence in rows)
receipt = await agent_message.send(
    json.dumps({{"piece": {piece!r}, "counts": counts}}), receiver_role="parent")
print(f"{{len(rows)}} distributions counted, report {{receipt['message_id']}} sent")
"""

_MERGE = """\
import collections, json
reports = {reports!r}
reported = collections.Counter()
for report in reports:
    reported.update(json.loads(report)["counts"])

synonyms = {{
    "MIT License": "MIT", "BSD License": "BSD", "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause", "BSD-3-Clause License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0", "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0", "Apache License, Version 2.0": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "ISC License (ISCL)": "ISC",
}}
table = collections.Counter()
for licence, count in reported.items():
    table[synonyms.get(licence, licence)] += count
matched = sum(reported.values()) == len(names)
(exports / "{file}").write_text(json.dumps(
    {{"distributions": len(names), "reported": sum(reported.values()),
      "sum_matched": matched, "licences": table}}))
print(f"{{len(names)}} distributions, sum of {{len(reports)}} reports matched: {{matched}}")
print(f"{{'count':>5}}  licence")
for licence, count in table.most_common():
    print(f"{{count:>5}}  {{licence}}")
"""

_PIECE = re.compile(rf"{_CHILD_TASK} (.+?) and report the counts")
_REPORT = re.compile(r'\{"piece": .*?\}\}')


def licence_script(transcript: Transcript) -> Reply:
    """Play the root or a child, by what the conversation holds.

    Decides from contents alone: how many turns it takes, and in which order the
    reports come, differs from run to run.
    """
    prompts = transcript.prompts
    if not prompts:
        return Reply(text="There is no task.")
    if found := _PIECE.search(prompts[0]):
        return _child(transcript, found[1])
    return _root(transcript)


def _child(transcript: Transcript, piece: str) -> Reply:
    results = transcript.tool_results
    if results:
        return Reply(text=f"Done: {results[-1]}")
    return _run(_COUNT.format(piece=piece))


def _root(transcript: Transcript) -> Reply:
    results = transcript.tool_results
    if not results:
        return _run(_COLLECT)
    if merged := [text for text in results if "reports matched:" in text]:
        return Reply(text=merged[-1])
    everything = "\n".join(transcript.prompts)
    reports = list(dict.fromkeys(_REPORT.findall(everything)))
    if len(reports) < CHILDREN:
        return Reply(text=f"{len(reports)} of {CHILDREN} reports are here.")
    return _run(_MERGE.format(reports=reports, file=INVENTORY_FILE))


def _run(code: str) -> Reply:
    return Reply(tool_uses=(ToolUse(name="ipython", arguments={"code": code}),))
