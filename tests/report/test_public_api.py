"""The public surface of `geutil.report`, frozen; see tests/test_public_api.py."""

from geutil import report
from tests.documented import check_surface

OTHERS = "Altered FileDifference FileOpMatch GraphDifference Rewired"
SIGNATURES = """
bits(plan: BitPlan, *, title: str | None = None) -> Page
diff(before: Any, after: Any, *, title: str | None = None, labels: Sequence[str] =
    (before, after), report: object = None) -> Page
difference(before: Any, after: Any) -> GraphDifference | FileDifference
memory(plain: Any, saving: Any = None, *, title: str | None = None, report: object =
    None, curve: object = None) -> Page
pipeline(stages: object, *, title: str | None = None, noise: Int8Comparison | None =
    None) -> Page
Page.save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path
view(subject: Any, *, title: str | None = None, report: object = None) -> Page
"""


def test_the_public_surface():
    check_surface(report, OTHERS, SIGNATURES, ["Page.save", "difference"])
