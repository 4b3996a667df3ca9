"""Whatever happened to a file: it is told or refused, opened or refused."""

from collections import Counter

import testdata.powers
from tests import tflite_files
from tests.kept import kept
from tests.model import fuzzing, samples
from tests.settings import needs_eager
from tests.thorough import is_quick

pytestmark = needs_eager


def test_damage_neither_ends_hangs_nor_swells_the_process():
    folder = kept(fuzzing.write_all, testdata.powers, samples, tflite_files)
    jobs = fuzzing.jobs_for(80 if is_quick() else 800)
    # The process ends of what is no target; another one goes on.
    middle = len(jobs) // 2
    listed = [*jobs[:middle], ("nothing", 0), *jobs[middle:]]
    outcomes = list(fuzzing.run(folder, listed))
    assert [(o.target, o.seed) for o in outcomes] == listed
    ended = outcomes.pop(middle)
    assert ended.result == "ended with 1" and "KeyError: 'nothing'" in ended.detail
    assert [o for o in outcomes if not o.ok] == []
    # Most damage is found; some of a field is harmless, as in a variable's name.
    found = Counter((o.target, o.detail) for o in outcomes)
    for target in fuzzing.OPENED_TOO:
        refused, has_fields = found[target, fuzzing.REFUSED], fuzzing.TARGETS[target][2]
        assert refused > found[target, fuzzing.OPENED] or has_fields
        assert refused, target
