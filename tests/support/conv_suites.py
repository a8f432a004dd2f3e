"""Convolutions of models and of every kind, by name, in float16 and channels last."""

from __future__ import annotations

from collections.abc import Callable

from .convolutions import DATA_LAYOUTS, Conv, random_convolution

CHANNELS_LAST_WEIGHTS = {1: "OWI", 2: "OHWI", 3: "ODHWI"}


def last(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    channels: int,
    filters: int,
    stride: int = 1,
    batch: int = 32,
    groups: int = 1,
    dilation: int = 1,
    epilogue: str = "scale_shift",
    dtype: str = "float16",
    **more,
) -> Conv:
    """A convolution as torch pads it: half of the filter on each side."""
    rank = len(sizes)
    padding = tuple(dilation * (k - 1) // 2 for k in kernel) * 2
    options = dict(
        strides=(stride,) * rank,
        padding=padding,
        dilation=(dilation,) * rank,
        data_layout=DATA_LAYOUTS[rank][1],
        weight_layout=CHANNELS_LAST_WEIGHTS[rank],
        dtype=dtype,
        epilogue=epilogue,
        constant=False,
    )
    return Conv(sizes, kernel, channels, filters, batch, groups, **(options | more))


def square(size: int, kernel: int, channels: int, filters: int, **more) -> Conv:
    """Of a square image."""
    return last((size, size), (kernel, kernel), channels, filters, **more)


RESNET50 = (  # size of the data, taps, channels, filters, stride
    (56, 1, 64, 64, 1),
    (56, 3, 64, 64, 1),
    (56, 1, 64, 256, 1),
    (56, 1, 256, 64, 1),
    (56, 1, 256, 128, 1),
    (56, 3, 128, 128, 2),
    (56, 1, 256, 512, 2),
    (28, 1, 128, 512, 1),
    (28, 1, 512, 128, 1),
    (28, 3, 128, 128, 1),
    (28, 1, 512, 256, 1),
    (28, 3, 256, 256, 2),
    (28, 1, 512, 1024, 2),
    (14, 1, 256, 1024, 1),
    (14, 1, 1024, 256, 1),
    (14, 3, 256, 256, 1),
    (14, 1, 1024, 512, 1),
    (14, 3, 512, 512, 2),
    (14, 1, 1024, 2048, 2),
    (7, 1, 512, 2048, 1),
    (7, 1, 2048, 512, 1),
    (7, 3, 512, 512, 1),
)


def resnet50() -> dict[str, Conv]:
    """The distinct convolutions of ResNet-50 behind its stem."""
    found = {}
    for size, kernel, channels, filters, stride in RESNET50:
        step = f"s{stride}" if stride > 1 else ""
        name = f"{size} {kernel}x{kernel}{step} {channels}-{filters}"
        found[name] = square(size, kernel, channels, filters, stride=stride)
    return found


def kinds() -> dict[str, Conv]:
    """Every kind that networks have."""
    return {
        "block 56 3x3 256-256": square(56, 3, 256, 256),
        "block residual 56 3x3 256-256": square(56, 3, 256, 256, epilogue="residual"),
        "stem 224 7x7s2 3-64": square(224, 7, 3, 64, stride=2),
        "stem 224 3x3s2 3-32": square(224, 3, 3, 32, stride=2),
        "patches 224 16x16s16 3-768": square(224, 16, 3, 768, stride=16, padding=(0,) * 4),
        "patches 56 2x2s2 96-192": square(56, 2, 96, 192, stride=2, padding=(0,) * 4),
        "dilated 56 3x3 128-128": square(56, 3, 128, 128, batch=8, dilation=2),
        "dilated 28 3x3 256-256": square(28, 3, 256, 256, batch=8, dilation=4),
        "grouped 28 3x3 256-256 g8": square(28, 3, 256, 256, groups=8),
        "grouped 14 3x3 1024-1024 g32": square(14, 3, 1024, 1024, groups=32),
        "grouped 56 3x3 128-128 g32": square(56, 3, 128, 128, groups=32),
        "odd 37 3x3 72-40": square(37, 3, 72, 40, batch=9),
        "odd 31 5x5 100-51": square(31, 5, 100, 51, batch=8),
        "few 112 3x3 32-32": square(112, 3, 32, 32, batch=16),
        "few 112 3x3 16-64": square(112, 3, 16, 64, batch=16),
        "decoder 128 3x3 320-320": square(64, 3, 320, 320, batch=2),
        "decoder 32 3x3 1280-640": square(32, 3, 1280, 640, batch=2),
        "whisper 1 3000 3 80-512": last((3000,), (3,), 80, 512, batch=1),
        "whisper 2 3000 3s2 512-512": last((3000,), (3,), 512, 512, stride=2, batch=1),
        "audio 16000 7 64-64": last((16000,), (7,), 64, 64, batch=4),
        "audio 8000 15 128-128": last((8000,), (15,), 128, 128, batch=4),
        "video 8x56x56 3x3x3 64-64": last((8, 56, 56), (3, 3, 3), 64, 64, batch=2),
        "video 16x28x28 3x1x1 128-128": last((16, 28, 28), (3, 1, 1), 128, 128, batch=4),
        "volume 32 3x3x3 32-32": last((32, 32, 32), (3, 3, 3), 32, 32, batch=2),
        "volume 16 3x3x3 128-128": last((16, 16, 16), (3, 3, 3), 128, 128, batch=2),
        "float32 56 3x3 64-64": square(56, 3, 64, 64, batch=8, dtype="float32"),
        "bfloat16 28 3x3 128-128": square(28, 3, 128, 128, dtype="bfloat16"),
    }


def thin() -> dict[str, Conv]:
    """3 x 3 convolutions of few filters: of DenseNet, and first layers of others."""
    found = {f"dense {n} 3x3 128-32": square(n, 3, 128, 32) for n in (56, 28, 14, 7)}
    found["dense 56 3x3 128-32 plain"] = square(56, 3, 128, 32, epilogue="none")
    for n, channels, filters in ((56, 64, 64), (112, 32, 32), (112, 64, 32), (224, 16, 16)):
        found[f"thin {n} 3x3 {channels}-{filters}"] = square(n, 3, channels, filters, batch=16)
    found["thin 56 3x3 64-64 residual"] = square(56, 3, 64, 64, epilogue="residual")
    found["thin 28 5x5 64-24"] = square(28, 5, 64, 24)
    found["thin 16000 7 64-64"] = last((16000,), (7,), 64, 64, batch=4)
    return found


def stems() -> dict[str, Conv]:
    """First layers of networks: few channels."""
    whole = dict(padding=(0,) * 4)
    return {
        "stem 224 7x7s2 3-64": square(224, 7, 3, 64, stride=2),
        "stem 224 7x7s2 3-64 b1": square(224, 7, 3, 64, stride=2, batch=1),
        "stem 224 3x3s2 3-16": square(224, 3, 3, 16, stride=2),
        "stem 224 3x3s2 3-32": square(224, 3, 3, 32, stride=2),
        "stem 224 3x3s2 3-32 b1": square(224, 3, 3, 32, stride=2, batch=1),
        "stem 299 3x3s2 3-32": square(299, 3, 3, 32, stride=2, **whole),
        "stem 224 3x3 3-64": square(224, 3, 3, 64, batch=16),
        "stem 224 11x11s4 3-64": square(224, 11, 3, 64, stride=4, padding=(2,) * 4),
        "stem 224 4x4s4 3-96": square(224, 4, 3, 96, stride=4, **whole),
        "stem 224 16x16s16 3-768": square(224, 16, 3, 768, stride=16, **whole),
        "stem 64 3x3 4-320": square(64, 3, 4, 320, batch=8),
        "stem 28 5x5 1-32": square(28, 5, 1, 32, batch=256),
        "stem 16000 10s5 1-512": last((16000,), (10,), 1, 512, stride=5, batch=8, padding=(0, 0)),
        "stem 224 7x7s2 3-64 from channels first": square(
            *(224, 7, 3, 64),
            **dict(stride=2, data_layout="NCHW", weight_layout="OIHW", epilogue="channels_moved"),
        ),
        "stem 96x96x96 3x3x3 1-16": last((96, 96, 96), (3, 3, 3), 1, 16, batch=2),
    }


def depthwise() -> dict[str, Conv]:
    """Depthwise convolutions of MobileNet, EfficientNet and ConvNeXt."""
    shapes = (
        *((112, 3, 64, 1), (112, 3, 96, 2), (56, 3, 128, 1), (56, 3, 144, 1), (56, 3, 144, 2)),
        *((28, 3, 256, 1), (14, 3, 512, 1), (56, 5, 144, 2), (28, 5, 240, 1), (14, 5, 672, 1)),
        *((56, 7, 96, 1), (28, 7, 192, 1), (14, 7, 384, 1), (7, 7, 768, 1)),
    )
    return {
        f"depthwise {n} {k}x{k}{'s2' if s > 1 else ''} {c}": square(n, k, c, c, stride=s, groups=c)
        for n, k, c, s in shapes
    }


def transposed() -> dict[str, Conv]:
    """Transposed convolutions of decoders, weights as torch has them."""

    def made(sizes: tuple[int, ...], kernel: int, channels: int, filters: int, **more) -> Conv:
        rank = len(sizes)
        options = dict(
            strides=(2,) * rank,
            padding=((kernel - 2) // 2,) * (2 * rank),
            transposed=True,
            output_padding=(kernel % 2,) * rank,
            weight_layout="IO" + "DHW"[-rank:],
        )
        if kernel % 2:
            options["padding"] = (kernel // 2,) * (2 * rank)
        return last(sizes, (kernel,) * rank, channels, filters, **(options | more))

    return {
        "up 28 2x2s2 256-128": made((28, 28), 2, 256, 128, batch=8),
        "up 56 4x4s2 128-64": made((56, 56), 4, 128, 64, batch=8),
        "up 32 3x3s2 128-64": made((32, 32), 3, 128, 64, batch=8),
        "up 16 4x4s2 512-256": made((16, 16), 4, 512, 256, batch=16),
        "up 8 4x4s2 512-512": made((8, 8), 4, 512, 512, batch=16),
        "up 64 4x4s2 64-32": made((64, 64), 4, 64, 32, batch=4),
        "up1 1000 4s2 256-128": made((1000,), 4, 256, 128, batch=4),
        "up3 8 2x2x2s2 128-64": made((8, 8, 8), 2, 128, 64, batch=2),
        "up3 16 4x4x4s2 64-32": made((16, 16, 16), 4, 64, 32, batch=2),
    }


def random_ones() -> dict[str, Conv]:
    """200 of every kind, and of odd sizes."""
    return {f"random {seed}": random_convolution(seed) for seed in range(200)}


SUITES: dict[str, Callable[[], dict[str, Conv]]] = {
    "resnet50": resnet50,
    "kinds": kinds,
    "thin": thin,
    "stems": stems,
    "depthwise": depthwise,
    "transposed": transposed,
    "random": random_ones,
}
