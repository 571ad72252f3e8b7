"""``launch_server``, but it does not outlive the process that started it, however that ends.
Its first argument is that process's pid."""

import sys

from mamba_eagle import launch_server
from mamba_eagle.message.lifetime import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)))
    sys.exit(launch_server.main())
