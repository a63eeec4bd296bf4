#!/bin/sh
# Builds the images of extender and agent with docker, podman or buildah. `make images` runs it.
#
#   BASE      base image by digest. Example: python:3.12-slim@sha256:... Required.
#   VERSION   tag and label. Default: the version in pyproject.toml
#   REGISTRY  first part of the names. Default: localhost
#   REVISION  label. Default: the commit that is checked out, and -dirty if files differ from it
#   BUILDER   the program. Default: the first that is installed
#   FLAGS     further flags of the program's command `build`
#   OUT       folder to save each image in, as NAME.tar. Default: images are not saved
set -eu
cd "$(dirname "$0")/.."

fail() {
  echo "deploy/images.sh: $1" >&2
  exit 1
}

case ${BASE:-} in
  ?*@sha256:?*) ;;
  *) fail "BASE is '${BASE:-}', not an image by digest. Example: BASE=python:3.12-slim@sha256:... (docs/get-started/images.md)" ;;
esac
for each in docker podman buildah; do
  if [ -z "${BUILDER:-}" ] && command -v "$each" > /dev/null; then BUILDER=$each; fi
done
[ -n "${BUILDER:-}" ] || fail "docker, podman and buildah are not installed. Install one of them, or set BUILDER"
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
revision=${REVISION:-$(git describe --always --abbrev=40 --exclude='*' --dirty 2> /dev/null || echo unknown)}

# Labels are written into the Dockerfile, because buildah 1.28 takes labels from build arguments and flags out of the cache
# of an earlier build.
label=org.opencontainers.image
labels="$label.version=$version $label.revision=$revision $label.base.name=${BASE%@*} $label.base.digest=${BASE#*@}"
for name in headroom-extender headroom-agent; do
  image=${REGISTRY:-localhost}/$name:$version
  # FLAGS are several words.
  # shellcheck disable=SC2086
  sed "s|^LABEL .*|& $labels|" Dockerfile | "$BUILDER" build --file - --target "${name#headroom-}" --tag "$image" \
    --build-arg "PYTHON=${BASE%@*}" --build-arg "PYTHON_DIGEST=${BASE#*@}" ${FLAGS:-} .
  if [ -n "${OUT:-}" ]; then
    mkdir -p "$OUT"
    rm -f "$OUT/$name.tar"
    case ${BUILDER##*/} in
      buildah) "$BUILDER" push --quiet "$image" "oci-archive:$OUT/$name.tar:$image" ;;
      podman) "$BUILDER" save --quiet --format oci-archive --output "$OUT/$name.tar" "$image" ;;
      *) "$BUILDER" save --output "$OUT/$name.tar" "$image" ;;
    esac
  fi
  echo "built $image"
done
