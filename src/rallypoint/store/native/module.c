/* `rallypoint.store._native`: the store in C as a Python type, with the interpreter's lock released while it works.
 *
 * It uses only the stable interface of Python 3.11, so that one file works with every later version. It must not use
 * formats with `#`: compiled with the headers of 3.13 or later, these fail under 3.12 and before.
 */
#include <Python.h>

#include "accepting.h"
#include "polling.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#ifndef SOURCES
#define SOURCES ""
#endif

typedef struct {
    PyObject_HEAD
    Store store;
    PyObject *refused, *cannot_accept, *is_other_user;
    PyThreadState *thread; /* of the caller, while the lock is released */
    bool held, open, busy; /* there are keys; connections are allowed; a thread is working */
} Sockets;

static Sockets *owner(Store *store)
{
    return (Sockets *)((char *)store - offsetof(Sockets, store));
}

/* Calls Python during work. An error there must not stop the store. */
static PyObject *call(PyObject *callback, PyObject *arguments)
{
    PyObject *result = arguments ? PyObject_CallObject(callback, arguments) : NULL;
    if (result == NULL)
        PyErr_WriteUnraisable(callback);
    Py_XDECREF(arguments);
    return result;
}

/* A Python bytes object with the same content; NULL without memory. */
static PyObject *copied(Text text)
{
    return PyBytes_FromStringAndSize((const char *)text.bytes, (Py_ssize_t)text.size);
}

static void on_refused(Store *store, int fd, const Refusal *refusal)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    PyObject *result = call(
        self->refused,
        Py_BuildValue("(iiKNN)", fd, (int)refusal->reason, (unsigned long long)refusal->number, copied(refusal->first),
                      copied(refusal->second)));
    Py_XDECREF(result);
    self->thread = PyEval_SaveThread();
}

static int on_cannot_accept(Store *store, int error)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    PyObject *result = call(self->cannot_accept, Py_BuildValue("(i)", error));
    long descriptors = result == NULL ? store->descriptors : PyLong_AsLong(result);
    if (descriptors == -1 && PyErr_Occurred()) {
        PyErr_WriteUnraisable(self->cannot_accept);
        descriptors = store->descriptors;
    }
    Py_XDECREF(result);
    self->thread = PyEval_SaveThread();
    return (int)descriptors;
}

static bool on_connected(Store *store, int fd)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    PyObject *result = call(self->is_other_user, Py_BuildValue("(i)", fd));
    bool is_other = result != Py_False; /* on an error, nobody may connect */
    Py_XDECREF(result);
    self->thread = PyEval_SaveThread();
    return is_other;
}

static bool usable(Sockets *self)
{
    if (self->open && !self->busy)
        return true;
    const char *why = self->open ? "the store is at work: one thread may use it, and no callback" : "the store is closed";
    PyErr_SetString(PyExc_RuntimeError, why);
    return false;
}

static PyObject *sockets_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"listener", "wake", "descriptors", "limits", "refused", "cannot_accept", "is_other_user", NULL};
    int listener, wake, descriptors;
    double retry, greeting;
    unsigned long long connections, request, value, keys, bytes;
    PyObject *refused, *cannot_accept, *is_other_user;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iii(ddKKKKK)OOO", names, &listener, &wake, &descriptors, &retry,
                                     &greeting, &connections, &request, &value, &keys, &bytes, &refused, &cannot_accept,
                                     &is_other_user))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Sockets *self = (Sockets *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->store.listener = listener;
    self->store.wake = wake;
    self->store.descriptors = descriptors;
    self->store.limits = (Limits){
        .retry = (uint64_t)(retry * 1e9), .greeting = (uint64_t)(greeting * 1e9), .connections = connections,
        .request = request, .value = value, .keys = keys, .bytes = bytes,
    };
    if (store_open(&self->store) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->held = self->open = true;
    self->store.refused = on_refused;
    self->store.cannot_accept = on_cannot_accept;
    self->store.is_other_user = is_other_user == Py_None ? NULL : on_connected;
    self->refused = Py_NewRef(refused);
    self->cannot_accept = Py_NewRef(cannot_accept);
    self->is_other_user = Py_NewRef(is_other_user);
    return (PyObject *)self;
}

static int sockets_clear(Sockets *self)
{
    Py_CLEAR(self->refused);
    Py_CLEAR(self->cannot_accept);
    Py_CLEAR(self->is_other_user);
    return 0;
}

static int sockets_traverse(Sockets *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->refused);
    Py_VISIT(self->cannot_accept);
    Py_VISIT(self->is_other_user);
    return 0;
}

/* Between these two, the store works and other threads may use the interpreter. */
static void begin_work(Sockets *self)
{
    self->busy = true;
    self->thread = PyEval_SaveThread();
}

static void end_work(Sockets *self)
{
    PyEval_RestoreThread(self->thread);
    self->thread = NULL;
    self->busy = false;
}

/* Ends connections and, with `all`, the store; meanwhile other threads may use the interpreter. */
static void end(Sockets *self, bool all)
{
    bool open = self->open, held = self->held;
    self->open = false;
    self->held = held && !all;
    begin_work(self);
    if (open)
        store_close(&self->store);
    if (held && all)
        store_free(&self->store);
    end_work(self);
    sockets_clear(self);
}

static void sockets_dealloc(Sockets *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    end(self, true);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *work(Sockets *self, bool until_woken)
{
    if (!usable(self))
        return NULL;
    bool any;
    begin_work(self);
    self->store.woken = false;
    do
        any = poll_once(&self->store, until_woken);
    while (until_woken && !self->store.woken);
    end_work(self);
    return PyBool_FromLong(any);
}

static PyObject *sockets_serve(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    PyObject *any = work(self, true);
    if (any == NULL)
        return NULL;
    Py_DECREF(any);
    Py_RETURN_NONE;
}

static PyObject *sockets_run_once(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    return work(self, false);
}

static PyObject *failure(int error)
{
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *sockets_add_connection(Sockets *self, PyObject *arguments)
{
    int fd;
    PyObject *given;
    char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(arguments, "iO", &fd, &given) || PyBytes_AsStringAndSize(given, &bytes, &size) < 0)
        return NULL;
    if (!usable(self))
        return NULL;
    begin_work(self);
    int error = conn_add(&self->store, fd, (Text){(const uint8_t *)bytes, (size_t)size});
    end_work(self);
    if (error)
        return failure(error);
    Py_RETURN_NONE;
}

static PyObject *sockets_set_peers(Sockets *self, PyObject *networks)
{
    char *bytes = "";
    Py_ssize_t size = 0;
    if (!usable(self))
        return NULL;
    bool guarded = networks != Py_None;
    if (guarded && PyBytes_AsStringAndSize(networks, &bytes, &size) < 0)
        return NULL;
    size_t count = (size_t)size / sizeof(Network);
    Network *peers = get_block(NULL, (size_t)size);
    if (peers == NULL)
        return PyErr_NoMemory();
    memcpy(peers, bytes, (size_t)size);
    begin_work(self);
    store_set_peers(&self->store, peers, count, guarded);
    end_work(self);
    Py_RETURN_NONE;
}

static PyObject *sockets_connections(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    return PyLong_FromSize_t(self->open ? self->store.conn_count : 0);
}

static PyObject *sockets_close(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    if (self->busy && !usable(self))
        return NULL;
    end(self, false);
    Py_RETURN_NONE;
}

static PyObject *sockets_release_memory(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    if (self->busy && !usable(self))
        return NULL;
    end(self, true);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"serve", (PyCFunction)sockets_serve, METH_NOARGS, "Serve until somebody writes to the eventfd."},
    {"run_once", (PyCFunction)sockets_run_once, METH_NOARGS, "Do some of what there is to do; whether there was anything."},
    {"add_connection", (PyCFunction)sockets_add_connection, METH_VARARGS,
     "Serve a connected, non-blocking socket from which this has been read, and own its descriptor."},
    {"set_peers", (PyCFunction)sockets_set_peers, METH_O,
     "Serve only who is in these networks, each of 16 bytes of an IPv6 address and one for how many bits count; None: all."},
    {"connections", (PyCFunction)sockets_connections, METH_NOARGS, "How many clients are connected."},
    {"close", (PyCFunction)sockets_close, METH_NOARGS, "End all connections; the listening socket is not closed."},
    {"release_memory", (PyCFunction)sockets_release_memory, METH_NOARGS, "After `close`: give the memory back."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A worker store's connections and all that it holds."},
    {Py_tp_new, sockets_new},
    {Py_tp_dealloc, sockets_dealloc},
    {Py_tp_traverse, sockets_traverse},
    {Py_tp_clear, sockets_clear},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "rallypoint.store._native.Sockets",
    .basicsize = sizeof(Sockets),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

static int begin(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Sockets", type) < 0) {
        Py_XDECREF(type);
        return -1;
    }
    Py_DECREF(type);
    if (PyModule_AddIntConstant(module, "INTERFACE", 5) < 0) /* increment it when `_native.pyi` changes */
        return -1;
    return PyModule_AddStringConstant(module, "SOURCES", SOURCES);
}

static PyModuleDef_Slot steps[] = {{Py_mod_exec, begin}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "The worker store in C.", .m_size = 0, .m_slots = steps,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
