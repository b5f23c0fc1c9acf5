"""The folders of the tests.

emulator      weft's language, its emulator, its mutation engine and `weft check` themselves
emulated      ops, modules and models on emulated ranks, and over gloo. cases_<package>.py has what a package of src/weft must
              compute, written once for the emulator, the mutations, gloo and GPUs
offline       kernels compiled without a GPU, and what their PTX must hold
planner       profiles, predictions, choices, tables, `weft tune`
integrations  Transformers, vLLM, SGLang, torch's own tensor parallelism; engines has an environment of its own
tooling       the command line, documents, pages, examples, types, the structure of the source, minutes of long commands
gpu           the checks on GPUs (gpu_*.py) and what starts, shares and records them

The files *.json and trends.csv record runs.
"""
