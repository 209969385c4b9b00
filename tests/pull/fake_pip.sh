#!/bin/sh
# Takes the place of "python -m pip download ... REQUIREMENT" where pip itself is not what is tested: copies the wheel
# from the folder PIP_FIND_LINKS and says what pip says.
for requirement; do :; done
name=$(printf %s "${requirement%%==*}" | tr - _)
for wheel in "$PIP_FIND_LINKS/$name"-*.whl; do
  [ -e "$wheel" ] || { echo "ERROR: No matching distribution found for $requirement"; exit 1; }
  cp "$wheel" . && echo "Saved ./${wheel##*/}"
done
