"""Whatever happened to a file: it is opened or refused, and nothing else."""

import random
from collections import Counter

from tests.model import fuzzing
from tests.model.mutations import mutate
from tests.thorough import is_quick

COUNTS = {
    "pb": 120,
    "pbtxt": 80,
    "saved_model": 100,
    "index": 60,
    "data": 60,
    "pb fields": 120,
    "saved_model fields": 80,
}


def count(target):
    """Return how often a target is damaged: less often where it has to be quick."""
    return COUNTS[target] // 12 if is_quick() else COUNTS[target]


def test_damage_is_refused_or_survived(models):
    assert set(COUNTS) == set(fuzzing.TARGETS)
    jobs = [(target, seed) for target in COUNTS for seed in range(count(target))]
    # The process ends of what is no target; another one goes on.
    middle = len(jobs) // 2
    listed = [*jobs[:middle], ("nothing", 0), *jobs[middle:]]
    outcomes = list(fuzzing.run(models, listed))
    assert [(o.target, o.seed) for o in outcomes] == listed
    ended = outcomes.pop(middle)
    assert ended.result == "ended with 1" and "KeyError: 'nothing'" in ended.detail
    assert [o for o in outcomes if not o.ok] == []
    # Most damage is found; some is harmless, as in the name of a variable.
    found = Counter((o.target, o.result) for o in outcomes)
    for target in COUNTS:
        refused = found[target, fuzzing.REFUSED]
        assert refused > found[target, fuzzing.OPENED] or target.endswith("fields")
        assert refused, target


def test_the_damage_is_the_same_for_the_same_seed(models, tmp_path):
    for target, (_, file) in fuzzing.TARGETS.items():
        copies = []
        for name in ("first", "second"):
            scratch = tmp_path / target / name
            scratch.mkdir(parents=True)
            copy = fuzzing.damaged(models, target, 3, scratch)
            copies.append((copy / file if copy.is_dir() else copy).read_bytes())
        assert copies[0] == copies[1]


def test_each_mutation_happens():
    rng = random.Random(0)
    data = b"0123456789"
    found = [mutate(data, rng) for _ in range(200)]
    assert len({kind for kind, _ in found}) == 7
    assert all(changed != data for _, changed in found)
