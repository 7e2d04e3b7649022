"""Who publishes each dataset: addresses, checksums, and what a person must do by hand.

A checksum is given where it is documented in several independent places; the others are None, and
`fedshot data get` says so. Sizes are the publisher's; a download that grows past them is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_LAKE = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"  # LeCun's own page no longer serves them
_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"


@dataclass(frozen=True)
class Remote:
    """A file of a publisher: its name here, its addresses in order of trust, and its checksum."""

    name: str
    urls: tuple[str, ...]
    at_most: int  # bytes
    checksum: str | None = None  # "md5:..." or "sha256:..."; None means not verified
    repacked: bool = False  # whole copies with another checksum are about
    unpacked: str | None = None  # the same of what a .gz holds, should others have packed it again


@dataclass(frozen=True)
class Publisher:
    """How to come by one dataset: files to download, or words for a person (`manual`)."""

    folder: str
    files: tuple[Remote, ...] = ()
    manual: str = ""


def _idx(base: str, sums: tuple[str, ...], plain: tuple[str, ...] = ()) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        Remote(
            f"{name}-ubyte.gz",
            (f"{base}/{name}-ubyte.gz",),
            40_000_000,
            f"md5:{sums[i]}",
            unpacked=f"md5:{plain[i]}" if plain else None,
        )
        for i, name in enumerate(names)
    )


PUBLISHERS: dict[str, Publisher] = {
    "news20": Publisher(
        "20newsgroups",
        (
            Remote(
                "20news-bydate.tar.gz",
                (
                    "https://ndownloader.figshare.com/files/5975967",
                    "https://qwone.com/~jason/20Newsgroups/20news-bydate.tar.gz",
                ),
                20_000_000,
                "sha256:8f1b2514ca22a5ade8fbb9cfa5727df95fa587f4c87b786e15c759fa66d95610",
                repacked=True,
            ),
        ),
    ),
    "cifar10": Publisher(
        "cifar10",
        (
            Remote(
                "cifar-10-python.tar.gz",
                (f"{_TORONTO}/cifar-10-python.tar.gz",),
                170_498_071,
                "md5:c58f30108f718f92721af3b95e74349a",
            ),
        ),
    ),
    "cifar100": Publisher(
        "cifar100",
        (
            Remote(
                "cifar-100-python.tar.gz",
                (f"{_TORONTO}/cifar-100-python.tar.gz",),
                169_001_437,
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
            ),
        ),
    ),
    "fashion_mnist": Publisher(
        "fashionmnist",
        _idx(
            _FASHION,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "glove": Publisher(
        "glove",
        (
            Remote(
                "glove.6B.zip",
                ("https://nlp.stanford.edu/data/glove.6B.zip",),
                862_182_613,
                "sha256:617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb",
            ),
        ),
    ),
    "huffpost": Publisher(
        "huffpost",
        manual=(
            "The 36,900 headlines are handed out by the authors of Distributional Signatures (Bao "
            "et al., 2020), by a link in the README of the repository "
            "github.com/YujiaBao/Distributional-Signatures. Download the archive of data there, "
            "and put its huffpost.json into {folder}."
        ),
    ),
    "mini_imagenet": Publisher(
        "miniimagenet",
        manual=(
            "The images are ImageNet's, whose terms must be accepted by a person: ask for access "
            "at https://image-net.org, and scale the 60,000 images listed in train.csv, val.csv "
            "and test.csv (repository github.com/twitter-research/meta-learning-lstm, "
            "data/miniImagenet) to 84x84; or take a copy made so by your group. Put one zip of the "
            "images, or a folder images/, into {folder}, with the three csv files beside it."
        ),
    ),
    "mnist": Publisher(
        "mnist",
        _idx(
            _MNIST,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
        ),
    ),
    "omniglot": Publisher(
        "omniglot",
        (
            Remote(
                "images_background.zip",
                (f"{_LAKE}/images_background.zip",),
                20_000_000,
                "md5:68d2efa1b9178cc56df9314c21c6e718",
                repacked=True,
            ),
            Remote(
                "images_evaluation.zip",
                (f"{_LAKE}/images_evaluation.zip",),
                20_000_000,
                "md5:6b91aef0f799c5bb55b94e3f2daec811",
                repacked=True,
            ),
        ),
    ),
    "sent140": Publisher(
        "sent140",
        manual=(
            "Open http://help.sentiment140.com/for-students in a browser, follow the link to the "
            "training data (trainingandtestdata.zip), unpack it, and put "
            "training.1600000.processed.noemoticon.csv into {folder}."
        ),
    ),
    "tiered_imagenet": Publisher(
        "tieredimagenet",
        manual=(
            "The images are ImageNet's, whose terms must be accepted by a person: ask for access "
            "at https://image-net.org. The class lists come with fedshot. Scale the images of the "
            "608 classes to 84x84 and put them into {folder} as <class>/<image>.jpg (or "
            "train/<class>/ and so on), or as one zip of these folders."
        ),
    ),
}
