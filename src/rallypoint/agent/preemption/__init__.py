"""The preemption of the whole job: what tells a node of it (`triggers`, `job_deadline`), and what an agent does beside
its workers then (`preempted_job`, `requeue`). The decisions are in `agent.policy_preemption`.
"""
