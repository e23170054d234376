"""`python -m run_code CODE`: as `python -c CODE`, for what can only start modules."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
