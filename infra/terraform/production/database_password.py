"""Writes the database's password to the file that libpq reads for each new connection (PGPASSFILE).

    database_password.py REGION SECRET FILE

RDS changes the password every seven days, so a timer runs this program once a minute.
"""

import json
import os
import re
import sys

import boto3

region, secret, file = sys.argv[1:]
value = boto3.client("secretsmanager", region_name=region).get_secret_value(SecretId=secret)["SecretString"]
password = re.sub(r"([\\:])", r"\\\1", json.loads(value)["password"])
with open(os.open(f"{file}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as partial:
    partial.write(f"*:*:*:*:{password}\n")
os.replace(f"{file}.new", file)
