"""Start an example: `python FILE --emulated` on emulated ranks without a GPU, `torchrun --nproc-per-node N FILE` on GPUs."""

import os
import re
import sys

import weft


def launch(main, *sizes, emulated=4, on_gpus=lambda world: None):
    """Run main(world), which raises if a result is wrong. On GPUs run main(world, *sizes), then on_gpus(world)."""
    text = sys.modules["__main__"].__doc__
    title = re.split(r"\.\s", text, maxsplit=1)[0]  # the first sentence
    if "--emulated" in sys.argv[1:]:
        weft.spmd(main, emulated, backend="emulated")
        rank, where = 0, f"{emulated} emulated ranks"
    elif "RANK" in os.environ:
        world = weft.init()
        main(world, *sizes)
        on_gpus(world)
        rank, where = world.rank, f"{world.size} GPUs"
    else:
        sys.exit(text)
    if rank == 0:
        print(f"{' '.join(title.split())}: right on {where}")
