/* Executes requests. False means that there was no memory, and that nothing has changed. */
#pragma once

#include "store.h"

bool command_set(Store *, Conn *, Text key, Text value, Refusal *);
bool command_append(Store *, Conn *, Text key, Text value, Refusal *);
bool command_compare_set(Store *, Conn *, Text key, Text expected, Text desired, Refusal *);
void command_get(Store *, Conn *, Text key);
bool command_has(const Table *, Text key);
bool command_has_value(const Table *, Text key);
bool command_add(Store *, Conn *, Text key, int64_t delta, Refusal *);
bool command_barrier(Store *, Conn *, Text key, int64_t world_size, Refusal *);
void command_num_keys(Store *, Conn *);
void command_delete_key(Store *, Conn *, Text key);
bool command_queue_push(Store *, Conn *, Text key, Text value, Refusal *);
void command_queue_pop(Store *, Conn *, Text key);
void command_queue_len(Store *, Conn *, Text key);
