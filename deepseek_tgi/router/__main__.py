"""`python -m deepseek_tgi.router`."""

import sys

from deepseek_tgi.router.main import main

if __name__ == "__main__":
    sys.exit(main())
