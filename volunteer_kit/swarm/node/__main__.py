"""`python -m volunteer_kit.swarm.node FD`."""

import sys

from volunteer_kit.swarm.node.process import main

sys.exit(main())
