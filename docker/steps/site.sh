# Sourced by the steps of a Dockerfile that download: configures apt and pip with the
# site's build secrets.
export DEBIAN_FRONTEND=noninteractive
if [ -e /run/secrets/apt_conf ]; then cat /run/secrets/apt_conf >/tmp/apt.conf; fi
if [ -e /run/secrets/ca_certificates ]; then
  export PIP_CERT=/run/secrets/ca_certificates
  echo "Acquire::https::CAInfo \"$PIP_CERT\";" >>/tmp/apt.conf
fi
if [ -e /tmp/apt.conf ]; then export APT_CONFIG=/tmp/apt.conf; fi
if [ -e /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi
