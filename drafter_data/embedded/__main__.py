"""`python -m drafter_data.embedded`: the embedded engine as a process. Started by `launch.py` and by the CLI."""

from __future__ import annotations

import os

# NumPy reads these once, when it is first imported: one BLAS thread gives the same bits everywhere and is faster here.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

if __name__ == "__main__":
    from drafter_data.embedded.serve import main

    main()
