/* `rallypoint.store._native`: the store in C as a Python type, with the interpreter's lock released while it works.
 *
 * Only the stable interface of Python 3.11 is used, so that one file serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#ifndef SOURCES
#define SOURCES ""
#endif

typedef struct {
    PyObject_HEAD
    Store store;
    PyObject *refused, *starved;
    PyThreadState *thread; /* of whoever is in `ready`, while the lock is released */
    bool held, open, busy; /* something is stored; connections can be made; a thread is at work */
} Sockets;

static Sockets *owner(Store *store)
{
    return (Sockets *)((char *)store - offsetof(Sockets, store));
}

/* Calls Python from `ready`. What goes wrong there must not stop the store. */
static void tell(PyObject *callback, PyObject *arguments)
{
    PyObject *result = arguments ? PyObject_CallObject(callback, arguments) : NULL;
    if (result == NULL)
        PyErr_WriteUnraisable(callback);
    Py_XDECREF(result);
    Py_XDECREF(arguments);
}

static void on_refused(Store *store, Conn *conn, const Refusal *refusal)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    tell(self->refused,
         Py_BuildValue("(iiKy#y#)", conn->fd, (int)refusal->reason, (unsigned long long)refusal->number,
                       refusal->first.bytes ? (const char *)refusal->first.bytes : "", (Py_ssize_t)refusal->first.size,
                       refusal->second.bytes ? (const char *)refusal->second.bytes : "",
                       (Py_ssize_t)refusal->second.size));
    self->thread = PyEval_SaveThread();
}

static void on_starved(Store *store, int error)
{
    Sockets *self = owner(store);
    PyEval_RestoreThread(self->thread);
    tell(self->starved, Py_BuildValue("(i)", error));
    self->thread = PyEval_SaveThread();
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
    static char *names[] = {"listener", "wake", "retry", "refused", "starved", NULL};
    int listener, wake;
    double retry;
    PyObject *refused, *starved;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "iidOO", names, &listener, &wake, &retry, &refused, &starved))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Sockets *self = (Sockets *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->store.listener = listener;
    self->store.wake = wake;
    self->store.retry = (uint64_t)(retry * 1e9);
    if (store_open(&self->store) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->held = self->open = true;
    self->store.refused = on_refused;
    self->store.starved = on_starved;
    self->refused = Py_NewRef(refused);
    self->starved = Py_NewRef(starved);
    return (PyObject *)self;
}

static int sockets_clear(Sockets *self)
{
    Py_CLEAR(self->refused);
    Py_CLEAR(self->starved);
    return 0;
}

static int sockets_traverse(Sockets *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->refused);
    Py_VISIT(self->starved);
    return 0;
}

/* Ends connections, and with `all` the store; others may use the interpreter meanwhile. */
static void end(Sockets *self, bool all)
{
    bool open = self->open, held = self->held;
    self->open = false;
    self->held = held && !all;
    PyThreadState *thread = PyEval_SaveThread();
    if (open)
        store_close(&self->store);
    if (held && all)
        store_free(&self->store);
    PyEval_RestoreThread(thread);
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
    self->busy = true;
    self->thread = PyEval_SaveThread();
    self->store.woken = false;
    do
        any = sweep(&self->store, until_woken);
    while (until_woken && !self->store.woken);
    PyEval_RestoreThread(self->thread);
    self->thread = NULL;
    self->busy = false;
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

static PyObject *sockets_turn(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    return work(self, false);
}

static PyObject *failure(int error)
{
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *sockets_adopt(Sockets *self, PyObject *arguments)
{
    int fd;
    const char *bytes;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(arguments, "iy#", &fd, &bytes, &size) || !usable(self))
        return NULL;
    self->busy = true;
    self->thread = PyEval_SaveThread();
    int error = conn_adopt(&self->store, fd, (Text){(const uint8_t *)bytes, (size_t)size});
    PyEval_RestoreThread(self->thread);
    self->thread = NULL;
    self->busy = false;
    if (error)
        return failure(error);
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

static PyObject *sockets_free(Sockets *self, PyObject *Py_UNUSED(nothing))
{
    if (self->busy && !usable(self))
        return NULL;
    end(self, true);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"serve", (PyCFunction)sockets_serve, METH_NOARGS, "Serve until somebody writes to the eventfd."},
    {"turn", (PyCFunction)sockets_turn, METH_NOARGS, "Do some of what there is to do; whether there was anything."},
    {"adopt", (PyCFunction)sockets_adopt, METH_VARARGS,
     "Serve a connected, non-blocking socket from which this has been read, and own its descriptor."},
    {"connections", (PyCFunction)sockets_connections, METH_NOARGS, "How many clients are connected."},
    {"close", (PyCFunction)sockets_close, METH_NOARGS, "End all connections; the listening socket is not closed."},
    {"free", (PyCFunction)sockets_free, METH_NOARGS, "After `close`: give the memory back."},
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
    if (PyModule_AddIntConstant(module, "INTERFACE", 2) < 0) /* one more whenever `_native.pyi` changes */
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
