#!/bin/sh
# Compiler launcher: runs the CUDA compiler and fails the build on what it only reports: register spills, and wgmma or
# setmaxnreg instructions that were serialised or ignored. Needs "-Xptxas -v" in the flags.
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" >"$log" 2>&1
status=$?
if grep -Eq '[1-9][0-9]* bytes spill|Potential Performance Loss|setmaxnreg.*ignored|\(C75[0-9][0-9]\)' "$log"; then
    cat "$log"
    echo "error: the compiler reports spills or ignored instructions (see above); the build refuses them" >&2
    exit 1
fi
grep -Ev '^ptxas info|^ +[0-9]+ bytes stack frame|^$' "$log"
exit $status
