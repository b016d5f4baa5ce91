#!/usr/bin/env bash
# Builds the documentation in build/docs; warnings are errors. The build downloads nothing.
#   scripts/docs.sh            build
#   scripts/docs.sh serve      build, serve on http://localhost:8000 and rebuild on every change
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi

setup_venv
cd "$root"
export NO_MKDOCS_2_WARNING=1  # hides a notice of the theme about another version
if [[ "${1:-build}" == serve ]]; then
  exec python -m mkdocs serve
fi
python -m mkdocs build --strict --quiet
echo "build/docs/index.html"
