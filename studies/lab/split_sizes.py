"""How many images the field's twenty data sets have: what a study on real models costs is counted from them."""

# task → images of train, validation and test: as published, after a tenth (at most 5000) is carved where a split lacks
_SIZES = """
cars 7330 814 8041, dtd 1880 1880 1880, eurosat 21870 2430 2700, gtsrb 23976 2664 12630, mnist 55000 5000 10000,
resisc45 18900 6300 6300, sun397 17865 1985 19850, svhn 68257 5000 26032, cifar100 45000 5000 10000,
fer2013 25839 2870 7178, flowers102 1020 1020 6149, oxford_iiit_pet 3312 368 3669, pcam 262144 32768 32768,
stl10 4500 500 8000, emnist 235000 5000 40000, cifar10 45000 5000 10000, food101 70750 5000 25250,
fashion_mnist 55000 5000 10000, rendered_sst2 6920 872 1821, kmnist 55000 5000 10000
"""
SPLITS = {task: tuple(map(int, sizes)) for task, *sizes in (one.split() for one in _SIZES.split(","))}
