#!/bin/sh
# Turns the root of a Debian, Ubuntu or Amazon Linux system into a node or a server of Everstep.
#
#   install.sh node|server WHEEL [--gpu]
#
# --gpu also installs NVIDIA's driver, its fabric manager and EFA, in the versions of versions.env (Debian, Ubuntu),.
# The script runs on an instance or in a chroot, and may run again: it then installs the given wheel. It enables the
# unit and starts nothing. Before the start, write /etc/everstep/agent.env or /etc/everstep/server.env (docs/operating.md).
set -eu

fail() {
  echo "install.sh: $*" >&2
  exit 1
}

role=${1:-}
wheel=${2:-}
gpu=${3:-}
: "${PIP_EXTRA_INDEX_URL:=}"
here=$(cd "$(dirname "$0")" && pwd)
prefix=/opt/everstep
. "$here/versions.env"
. /etc/os-release

case $role in
node)
  # DeepSpeed compiles its optimizer on the first use.
  extras=worker,training units="agent storage"
  deb_packages="iproute2 mdadm e2fsprogs util-linux g++ python3-dev"
  rpm_packages="iproute mdadm e2fsprogs util-linux gcc-c++"
  ;;
server)
  # `everstep db` calls pg_dump and pg_restore. A restore also needs psql, to create an empty database.
  extras=server,postgres units=server
  deb_packages=postgresql-client
  rpm_packages=postgresql16
  ;;
*) fail "the first argument is '$role'; use node or server" ;;
esac
[ -z "$gpu" ] || [ "$gpu" = --gpu ] || fail "the third argument is '$gpu'; use --gpu or nothing"
[ -f "$wheel" ] || fail "the wheel '$wheel' does not exist; 'make wheel' builds one in dist/"
[ "$(id -u)" = 0 ] || fail "run this script as root"
[ "$(uname -m)" = x86_64 ] || fail "nodes need x86_64 processors; this machine has $(uname -m)"

install_packages() {
  if command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -q
    apt-get install -q -y --no-install-recommends "$@"
  elif command -v dnf >/dev/null; then
    dnf install -q -y "$@"
  else
    fail "this system has neither apt-get nor dnf"
  fi
}

find_python() {
  for name in python3.13 python3.12 python3.11 python3; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$name"
      return
    fi
  done
}

install_system() {
  if command -v dnf >/dev/null; then
    # Amazon Linux has Python 3.9 as python3.
    # shellcheck disable=SC2086
    install_packages python3.11 python3.11-devel $rpm_packages
  else
    # shellcheck disable=SC2086
    install_packages ca-certificates python3 python3-venv $deb_packages
  fi
  python=$(find_python)
  [ -n "$python" ] || fail "$PRETTY_NAME has no Python 3.11 or newer; use Debian 12, Ubuntu 24.04 or Amazon Linux 2023"
}

install_wheel() {
  "$python" -m venv "$prefix"
  # Without a GPU, torch comes from its index of CPU builds, or from a mirror that PIP_EXTRA_INDEX_URL names.
  [ -n "$gpu$PIP_EXTRA_INDEX_URL" ] || set -- --extra-index-url https://download.pytorch.org/whl/cpu
  "$prefix/bin/pip" install --quiet --disable-pip-version-check --constraint "$here/constraints.txt" "$@" \
    "${wheel}[$extras]"
  # pip skips a wheel whose version is already installed.
  "$prefix/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-index --force-reinstall "$wheel"
  # The first start of a process must not compile, and ranks may not write here.
  "$prefix/bin/python" -m compileall -q "$prefix/lib" >/dev/null || true
}

install_gpu() {
  command -v apt-get >/dev/null || fail "--gpu supports Debian and Ubuntu; on Amazon Linux use an AMI with the driver"
  repository=$(echo "$ID$VERSION_ID" | tr -d .)
  keyring=cuda-keyring_${NVIDIA_KEYRING}_all.deb
  install_packages curl gnupg "linux-headers-$(uname -r)"
  work=$(mktemp -d)
  curl -fsSL -o "$work/$keyring" \
    "https://developer.download.nvidia.com/compute/cuda/repos/$repository/x86_64/$keyring"
  dpkg -i "$work/$keyring"
  install_packages "nvidia-driver-pinning-$NVIDIA_DRIVER"
  install_packages nvidia-open nvidia-fabricmanager nvidia-persistenced nvidia-modprobe
  curl -fsSL -o "$work/efa.tar.gz" "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER.tar.gz"
  tar -xzf "$work/efa.tar.gz" -C "$work"
  (cd "$work/aws-efa-installer" && ./efa_installer.sh -y --minimal)
  rm -rf "$work"
  systemctl enable nvidia-persistenced.service nvidia-fabricmanager.service
  check_gpu
}

check_gpu() {
  module=$(modinfo -F version nvidia)
  [ "$module" = "$NVIDIA_DRIVER" ] || fail "the driver has version $module; versions.env names $NVIDIA_DRIVER"
  nv-fabricmanager --version | grep -qF "$NVIDIA_DRIVER" || fail "the fabric manager's version differs from $module"
  /opt/amazon/efa/bin/fi_info --version >/dev/null || fail "the EFA installer left no libfabric in /opt/amazon/efa"
  find /opt/amazon -name 'libnccl-net*.so' | grep -q . || fail "the EFA installer left no aws-ofi-nccl in /opt/amazon"
}

install_units() {
  install -d -m 0700 /etc/everstep
  install -d /etc/systemd/system "$prefix/libexec"
  install -m 0755 "$here"/libexec/* "$prefix/libexec/"
  case $role in
  node)
    getent passwd everstep-ranks >/dev/null || useradd --system --no-create-home everstep-ranks
    cp -R "$here"/units/everstep-ranks* /etc/systemd/system/
    ;;
  server)
    getent passwd everstep >/dev/null || useradd --system --home-dir /var/lib/everstep --no-create-home everstep
    ;;
  esac
  for unit in $units; do
    install -m 0644 "$here/units/everstep-$unit.service" /etc/systemd/system/
    systemctl enable "everstep-$unit.service"
  done
  if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
  fi
}

install_system
install_wheel
[ -z "$gpu" ] || install_gpu
install_units
echo "installed $("$prefix/bin/everstep" --version) as a $role"
