from __future__ import annotations

def test_x(client, fleet, source):
    print(client.create_training_job(TrainingJobName="gpt", Source=source, EntryPoint="train.py", NodeCount=4))
    print(client.describe_training_job(TrainingJobName="gpt"))
