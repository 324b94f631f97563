# The example of a training job, with PyTorch. From the root of the repository:
#   docker build -f deploy/docker/train.Dockerfile -t registry.example.com/train:1 .
FROM registry.example.com/rallypoint:1
USER 0
RUN pip install --no-cache-dir torch==2.13.0 numpy==2.2.6
COPY examples/train_ddp.py /app/
USER 1000:1000
