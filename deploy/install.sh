#!/bin/sh
# Checks this archive and installs it, without a network. README-FIRST.md explains the steps.
#   sh install.sh --key release.pub --into /opt/fedsurrogate     a Python environment with the commands `site` and `coordinator`
#   sh install.sh --key release.pub --images                     load the images into Docker or Podman
#   sh install.sh --key release.pub --check                      check the archive only
# PYTHON: the Python for the environment, 3.11 or newer (python3).
set -eu
unset PYTHONPATH PYTHONHOME
fail() { echo "install.sh: $1" >&2; exit 1; }
usage() { fail "usage: sh install.sh --key release.pub (--into FOLDER | --images | --check)"; }

key="" into="" images="" check=""
while [ $# -gt 0 ]; do
    case $1 in
        --key) [ $# -gt 1 ] || usage; key=$2; shift 2 ;;
        --into) [ $# -gt 1 ] || usage; into=$2; shift 2 ;;
        --images) images=1; shift ;;
        --check) check=1; shift ;;
        *) usage ;;
    esac
done
if [ -z "$key" ] || [ -z "$into$images$check" ]; then usage; fi
[ -f "$key" ] || fail "there is no file $key; the coordinator gives it to you, over another channel than this archive"
key=$(cd "$(dirname "$key")" && pwd)/$(basename "$key")
case $into in "" | /*) ;; *) into=$(pwd)/$into ;; esac
cd "$(dirname "$0")"

case $key in "$(pwd)"/*) fail "the key $key lies in this archive, so it proves nothing; take it from another channel" ;; esac
command -v openssl >/dev/null || fail "needs openssl, to check the signature"
openssl pkey -pubin -in "$key" -noout 2>/dev/null || fail "$key is no public key; it begins with -----BEGIN PUBLIC KEY-----"
openssl dgst -sha256 -verify "$key" -signature SHA256SUMS.sig SHA256SUMS >/dev/null 2>&1 \
    || fail "the signature is not of this key: the archive was changed, or is another coordinator's. Do not use this archive"
sha256sum --check --strict --quiet SHA256SUMS || fail "a file is not the one that was signed. Do not use this archive"
# Every file is signed: one that was added would be read as well.
lists=$(mktemp -d)
sed 's/^[0-9a-f]*  //' SHA256SUMS | LC_ALL=C sort > "$lists/signed"
find . -type f ! -path ./SHA256SUMS ! -path ./SHA256SUMS.sig | LC_ALL=C sort > "$lists/here"
links=$(find . ! -type f ! -type d | head -n 1)
same=0; cmp -s "$lists/signed" "$lists/here" || same=1
added=$(LC_ALL=C comm -13 "$lists/signed" "$lists/here" | head -n 1)
rm -r "$lists"
if [ "$same" = 1 ] || [ -n "$links" ]; then fail "$added$links was not signed. Do not use this archive"; fi
echo "signature and $(wc -l < SHA256SUMS) files: right"

if [ -n "$images" ]; then
    ls images/*.tar >/dev/null 2>&1 || fail "this archive has no image; install the commands with --into"
    for engine in docker podman ""; do
        [ -z "$engine" ] || ! "$engine" info >/dev/null 2>&1 || break
    done
    [ -n "$engine" ] || fail "needs Docker or Podman, running"
    for image in images/*.tar; do "$engine" load --input "$image"; done
fi

if [ -n "$into" ]; then
    [ ! -e "$into" ] || fail "$into exists; name a folder that does not"
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
        || fail "$python is missing, or older than 3.11; name another: PYTHON=/path/to/python3.11 sh install.sh ..."
    here=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    packed=$(ls wheels | sed -n 's/.*-\(cp3[0-9]*\)-\1-.*/\1/p' | sort -u | head -n 1)
    if [ -n "$packed" ] && [ "$packed" != "$here" ]; then
        fail "the wheels are for $packed, and $python is $here (cp311 is Python 3.11); name another: PYTHON=/path/to/python sh install.sh ..."
    fi
    "$python" -m venv "$into" \
        || { rm -rf "$into"; fail "no environment could be made in $into; Debian and Ubuntu: install python3-venv"; }
    needed=$(sed -n 's/^# on disk: //p' requirements.txt)
    echo "installing $(grep -c == requirements.txt) packages, $needed on disk: about a minute for each 2 GB on an idle machine, in silence"
    PIP_CONFIG_FILE=/dev/null "$into/bin/python" -m pip install --quiet --no-index --no-cache-dir \
        --disable-pip-version-check --find-links wheels --require-hashes --no-deps --requirement requirements.txt \
        || { rm -rf "$into"; fail "pip failed; its reason stands above. The wheels are for Linux x86-64 and the Python that packed them"; }
    "$into/bin/python" -m pip check --disable-pip-version-check \
        || { rm -rf "$into"; fail "the packages do not work together; ask for another archive"; }
    if grep -q '^torchvision==' requirements.txt; then
        "$into/bin/python" -c 'import torchvision' \
            || { rm -rf "$into"; fail "torch and torchvision are not of one build, so no backbone would load; ask for another archive"; }
    fi
    cp sbom.cdx.json "$into/"
    # Where a package is missing, commands print how to pack it, in place of a line for pip, which has no index here.
    [ ! -f packed-extras.txt ] || cp packed-extras.txt "$into/"
    "$into/bin/site" --version
    echo "installed in $into: $into/bin/site, $into/bin/coordinator"
fi
