"""``python -m jaxquant.audit``: the command of ``jaxquant.aot``, under the name of the function ``jaxquant.audit``."""

import sys

import jaxquant

if __name__ == "__main__":
    sys.exit(jaxquant._audit_command())
