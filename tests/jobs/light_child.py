"""The process of a model in a batch, whose models need no TensorFlow.

Such a model has the name of its file as its only output, and its files are empty.
"""

from types import SimpleNamespace

from geutil import model
from geutil.cli import batch_child


def _open(path, signature, opened):
    def save(target, form):
        target.touch()
        return target

    opened.append(SimpleNamespace(outputs=[path.stem], save=save))


if __name__ == "__main__":
    model.Model = SimpleNamespace
    batch_child._open = _open
    batch_child.main()
