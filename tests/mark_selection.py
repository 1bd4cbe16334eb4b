"""Tells from a test file's text whether any of its tests can have the marks that `-m` asks for.

Importing all test files takes most of a minute, and a run of the engine tests needs few of them.
"""

import re
from collections.abc import Collection
from functools import partial
from itertools import chain, combinations

from _pytest.mark.expression import Expression

_MARK = re.compile(r"pytest\.mark\.(\w+)")
_OF_THE_FILE = re.compile(r"^pytestmark = (\[[^\]]*\]|.*)$", re.MULTILINE)
_NAME = re.compile(r"[a-zA-Z_]\w*")


def may_select(expression: str, source: str, set_by_files: Collection[str]) -> bool:
    """Whether `expression` can select a test of a file with this `source`.

    A mark that the file names is on all its tests if it is in `pytestmark`, else on any of them. Marks other
    than those `set_by_files` come from plug-ins, so any test may have them. The marks of an imported
    `pytestmark` are not known here.
    """
    of_all: set[str] = set()
    if (found := _OF_THE_FILE.search(source)) is not None:
        of_all.update(_MARK.findall(found[1]))
        if not of_all:
            return True
    asked = set(_NAME.findall(expression)) - {"and", "or", "not"}
    possible = asked.difference(set_by_files).union(_MARK.findall(source)).intersection(asked)
    uncertain = sorted(possible - of_all)
    compiled = Expression.compile(expression)
    subsets = chain.from_iterable(combinations(uncertain, size) for size in range(len(uncertain) + 1))
    return any(compiled.evaluate(partial(_is_in, of_all.union(subset))) for subset in subsets)


def _is_in(marks: set[str], name: str) -> bool:
    return name in marks
