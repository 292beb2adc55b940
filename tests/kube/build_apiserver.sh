#!/usr/bin/env bash
# Builds kube-apiserver from the sources that Debian 12 distributes and unpacks etcd beside it.
#
#   tests/kube/build_apiserver.sh DIRECTORY
#
# Leaves DIRECTORY/bin/{kube-apiserver,etcd} and nothing else: 130 MB. Takes five minutes of two
# cores, once. Nobody packages a kube-apiserver; the newest whose full sources Debian has is 1.20.
set -euo pipefail

target=$(mkdir -p "$1" && cd "$1" && pwd)
edition=2 # what else is changed in the sources: tests/kube/control_plane.py knows it too
if [ "$(cat "$target/bin/edition" 2> /dev/null)" = "$edition" ]; then
    exit 0
fi
if ! grep -qs '^VERSION_CODENAME=bookworm$' /etc/os-release; then
    echo "kube-apiserver is built from the sources of Debian 12 (bookworm), this is another system" >&2
    exit 1
fi
missing=()
for tool in rsync gcc make jq; do
    command -v "$tool" > /dev/null || missing+=("$tool")
done
if [ "${#missing[@]}" -gt 0 ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "missing: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
    apt-get update -qq
    apt-get install -yqq --no-install-recommends "${missing[@]}" > /dev/null
fi

work=$target/work
rm -rf "$work"
mkdir -p "$work"/{sources,lists/partial,cache/archives/partial,packages}
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"

# Lists of its own, with sources: the system's apt stays as it is.
for file in /etc/apt/sources.list.d/debian.sources; do
    sed 's/^Types: deb$/Types: deb deb-src/' "$file" > "sources/${file##*/}"
done
apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources"
    -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
echo "fetching sources and compiler"
"${apt[@]}" update
"${apt[@]}" source --download-only kubernetes
reflect=golang-github-modern-go-reflect2-dev
"${apt[@]}" download golang-1.19-go golang-1.19-src etcd-server "$reflect"
for package in golang-1.19-go_*.deb golang-1.19-src_*.deb etcd-server_*.deb "$reflect"_*.deb; do
    dpkg-deb -x "$package" packages
done
tar xzf kubernetes_*.orig.tar.gz
# Debian links the compiler's sources by absolute paths.
goroot=$work/packages/usr/lib/go-1.19
for name in src test misc api; do
    if [ -L "$goroot/$name" ]; then
        ln -sfn "$work/packages/usr/share/go-1.19/$name" "$goroot/$name"
    fi
done

echo "building kube-apiserver"
cd kubernetes-1.20*/
# The one it came with reads maps as Go before 1.18 laid them out, and crashes on custom resources.
rm vendor/github.com/modern-go/reflect2/*.{go,s}
cp "$work"/packages/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} \
    vendor/github.com/modern-go/reflect2/
export GOROOT=$goroot PATH=$goroot/bin:$PATH GOPATH=$PWD/.go GOCACHE=$work/gocache HOME=$work
export GO111MODULE=off CGO_ENABLED=0 GOFLAGS=
export KUBE_GIT_TREE_STATE=archive KUBE_GIT_VERSION=v1.20.2
export KUBE_GIT_COMMIT=faecb196815e248d3ecfb03c680a4507229c2a56
mkdir -p .go/src/k8s.io
ln -s ../../.. .go/src/k8s.io/kubernetes
make WHAT=cmd/kube-apiserver > "$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; exit 1; }

mkdir -p "$target/bin"
cp "$work/packages/usr/bin/etcd" "$target/bin/etcd"
cp _output/bin/kube-apiserver "$target/bin/.kube-apiserver"
mv "$target/bin/.kube-apiserver" "$target/bin/kube-apiserver"
echo "$edition" > "$target/bin/edition" # there when all is whole
echo "built $target/bin/kube-apiserver"
