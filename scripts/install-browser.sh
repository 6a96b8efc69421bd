#!/bin/sh
# The tests of the HTML report look at it in a headless Chromium. Where none can be installed they skip, and say so.
set -eu
for browser in chromium chromium-browser google-chrome; do      # those that tests/report/test_report_browser.py looks for
    if command -v "$browser" >/dev/null 2>&1; then
        exit 0
    fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } ||
        echo "no Chromium could be installed: the browser tests will be skipped"
else
    echo "no Chromium here, and no right to install one: the browser tests will be skipped"
fi
