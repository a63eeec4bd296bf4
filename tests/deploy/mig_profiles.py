"""The MIG profiles that NVIDIA documents, and their resource names in the device plugin.

The sources are the MIG user guide ("Supported MIG profiles") and the default configuration of the
MIG manager.
"""

#: Profile names of data center GPUs. A suffix such as "+me" stands for media extensions or
#: graphics.
_DATACENTER = ("1g.{}gb", "1g.{}gb+me", "1g.{}gb", "2g.{}gb", "3g.{}gb", "4g.{}gb", "7g.{}gb")


def _seven(*sizes_gb: int) -> tuple[str, ...]:
    one, double, half, whole = sizes_gb
    sizes = (one, one, double, double, half, half, whole)
    return tuple(name.format(size) for name, size in zip(_DATACENTER, sizes, strict=True))


PROFILES: dict[str, tuple[str, ...]] = {
    "A30 24 GB": ("1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"),
    "A100 40 GB": _seven(5, 10, 20, 40),
    "A100, H100 64 GB": _seven(8, 16, 32, 64),
    "A100, H100, A800, H800 80 GB": _seven(10, 20, 40, 80),
    "H100 94 GB": _seven(12, 24, 47, 94),
    "H100, GH200, H20 96 GB": _seven(12, 24, 48, 96),
    "H200, H20 141 GB": _seven(18, 35, 71, 141),
    "GH200 144 GB": _seven(18, 36, 72, 144),
    "B200 180 GB": _seven(23, 45, 90, 180),
    "GB200 186 GB": _seven(24, 47, 93, 186),
    "GB200 189 GB": _seven(24, 47, 95, 189),
    "B300 269 GB": _seven(34, 67, 135, 269),
    "GB300 278 GB": _seven(35, 70, 139, 278),
    "RTX PRO 4500 32 GB": (
        "1g.16gb", "1g.16gb+me", "1g.16gb+gfx", "1g.16gb+me.all", "1g.16gb-me",
        "2g.32gb", "2g.32gb+gfx", "2g.32gb+me.all", "2g.32gb-me",
    ),
    "RTX PRO 5000 48 GB": (
        "1g.24gb", "1g.24gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me",
        "2g.48gb", "2g.48gb+gfx", "2g.48gb+me.all", "2g.48gb-me",
    ),
    "RTX PRO 6000 96 GB": (
        "1g.24gb", "1g.24gb+me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me",
        "2g.48gb", "2g.48gb+gfx", "2g.48gb+me.all", "2g.48gb-me",
        "4g.96gb", "4g.96gb+gfx",
    ),
}  # fmt: skip


def resource_names() -> set[str]:
    """Return the extended resources of whole GPUs and of every profile, including the names with
    ``renameByDefault``.
    """
    profiles = {profile.replace("+", ".") for names in PROFILES.values() for profile in names}
    names = {"nvidia.com/gpu", *(f"nvidia.com/mig-{profile}" for profile in profiles)}
    return names | {f"{name}.shared" for name in names}
