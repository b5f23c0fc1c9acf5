"""How the examples start: `python FILE --emulated` on emulated ranks, without a GPU; `torchrun --nproc-per-node N FILE` on GPUs."""

import os
import sys

import weft


def launch(main, *sizes, emulated=4, then=lambda world: None):
    """main(world), which raises where something is wrong; with `sizes` behind the world, and `then`, on GPUs."""
    text = sys.modules["__main__"].__doc__
    if "--emulated" in sys.argv[1:]:
        weft.spmd(main, emulated, backend="emulated")
        rank, where = 0, f"{emulated} emulated ranks"
    elif "RANK" in os.environ:
        world = weft.init()
        main(world, *sizes)
        then(world)
        rank, where = world.rank, f"{world.size} GPUs"
    else:
        sys.exit(text)
    if rank == 0:
        print(f"{' '.join(text.partition('.')[0].split())}: right on {where}")
