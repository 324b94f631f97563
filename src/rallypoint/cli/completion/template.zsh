#compdef rallyrun rallyctl
# Completion of rallyrun and rallyctl for zsh, made by 'rallyctl completion zsh'.

#TABLES

_rallyrun() {
    local curcontext=$curcontext index
    typeset -A opt_args
    # Flags can be written with torchrun's underscores.
    for (( index = 2; index <= $#words; index++ )); do
        [[ $words[index] == --*_* ]] && words[index]=${${words[index]%%=*}//_/-}${words[index]#${words[index]%%=*}}
    done
    [[ $PREFIX == --*_* ]] && PREFIX=${${PREFIX%%=*}//_/-}${PREFIX#${PREFIX%%=*}}
    if [[ $service == rallyctl ]]; then
        if (( CURRENT == 2 )); then
            _describe -o option '(--help:show\ the\ help\ page --version:show\ the\ version)'
            _describe verb _rallypoint_verbs
            return
        fi
        shift words
        (( CURRENT -= 1 ))
        if [[ $words[2] == -- ]] && (( CURRENT > 2 )); then # _arguments knows it behind flags only
            words[2]=()
            (( CURRENT -= 1 ))
        fi
        curcontext="${curcontext%:*:*}:rallyctl-$words[1]:"
        _rallypoint_arguments "rallyctl $words[1]"
    else
        _rallypoint_arguments rallyrun
    fi
}

# What can stand for a value: names of kind $1, several with $2 between them, and the words that follow.
_rallypoint_value() {
    local kind=$1 separator=$2 expl found=1
    shift 2
    local -a suffix=(-S '')
    [[ -n $separator ]] && compset -P "*$separator" || suffix=()
    if compset -P jsonl:; then
        _files
        return
    fi
    if (( $# )); then
        local -a open=("${(@M)@:#*[=:]}") closed=("${(@)@:#*[=:]}")
        _wanted values expl value compadd "$suffix[@]" -a closed && found=0
        _wanted values expl value compadd -S '' -a open && found=0
    fi
    case $kind in
        file) _files && found=0 ;;
        folder) _files -/ && found=0 ;;
        host) _rallypoint_hosts "$suffix[@]" && found=0 ;;
        variable) _parameters -g '*export*' && found=0 ;;
        interface) _wanted interfaces expl interface compadd "$suffix[@]" - /sys/class/net/*(N:t) && found=0 ;;
        program) _command_names -e && found=0 ;;
        script)
            if (( ${+opt_args[-m]} || ${+opt_args[--module]} )); then
                _rallypoint_modules && found=0
            elif (( ${+opt_args[--no-python]} )); then
                _command_names -e && found=0
            else
                _files -g '*.py' && found=0
            fi
            ;;
    esac
    return found
}

# Modules below this folder, as python -m takes them.
_rallypoint_modules() {
    local expl below=
    compset -P '*.' && below=${IPREFIX//.//}
    local -a packages=(${below}[^._]*(N/:t)) modules=(${below}*.py(N.:t:r))
    _wanted modules expl module compadd -S . -q -a packages
    _wanted modules expl module compadd -a modules
}

# Hosts: those of --hosts or --hostfile of this line, else of files that have hostfiles' names, and those zsh knows.
_rallypoint_hosts() {
    local expl
    local -a lines hosts
    if [[ -n $opt_args[--hosts] && $words[CURRENT-1] != --hosts && $IPREFIX != --hosts=* ]]; then
        lines=("${(@s:,:)opt_args[--hosts]}")
    elif [[ -n $opt_args[--hostfile] ]]; then
        lines=("${(@f)$(<${~opt_args[--hostfile]})}") 2>/dev/null
    else
        local file
        for file in (hostfile|hostfile.*|*.hostfile|hosts|hosts.txt)(N.) /job/hostfile(N.); do
            lines+=("${(@f)$(<$file)}")
        done
        _hosts "$@"
    fi
    # The first word of each line, without a number of slots.
    hosts=("${(@)${(@)lines%%\#*}%%[[:space:]]*}")
    hosts=("${(@)${(@M)hosts:#(\[*\]|[^:]#):<->}%:*}" "${(@)hosts:#(\[*\]|[^:]#):<->}")
    hosts=("${(@)hosts:#}")
    _wanted hosts expl host compadd "$@" -a hosts
}

if [[ $funcstack[1] == _rallyrun ]]; then
    _rallyrun "$@" # read by autoload, for the first TAB
else
    compdef _rallyrun rallyrun rallyctl
fi
