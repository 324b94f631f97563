# Completion of rallyrun and rallyctl for bash 4 and newer, made by 'rallyctl completion bash'.

#TABLES

_rallypoint() {
    local IFS=$' \t\n' words typed before cut='' character index
    COMPREPLY=()
    _rallypoint_split
    _rallypoint_line 0
    # Readline replaces only what follows the last of the characters at which it breaks words; with @, that too.
    typed=${words[${#words[@]} - 1]}
    for character in = : @; do
        if [[ $COMP_WORDBREAKS == *$character* && $typed == *$character* ]]; then
            before=${typed%"${typed##*$character}"}
            before=${before%@}
            [[ ${#before} -gt ${#cut} ]] && cut=$before
        fi
    done
    for index in "${!COMPREPLY[@]}"; do
        COMPREPLY[index]=${COMPREPLY[index]#"$cut"}
    done
}

# The line up to the cursor as words, without readline's breaks at = : @ inside of them; the last one is being written.
_rallypoint_split() {
    local rest=${COMP_LINE:0:COMP_POINT} word
    words=()
    for word in "${COMP_WORDS[@]}"; do
        if [[ ${#words[@]} -eq 0 || $rest == [[:space:]]* ]]; then
            rest=${rest#"${rest%%[![:space:]]*}"}
            words+=("")
        fi
        if [[ $rest != "$word"* ]]; then
            words[${#words[@]} - 1]+=$rest
            return
        fi
        words[${#words[@]} - 1]+=$word
        rest=${rest#"$word"}
    done
}

# Completes the command line that begins at words[$1].
_rallypoint_line() {
    local index=$1 command=${words[$1]##*/} last=$((${#words[@]} - 1)) flag='' operand=0 ended='' runs='' hosts=''
    local typed=${words[last]} hostfile='' flags='' short='' kind='' known='' separator=''
    ((index += 1))
    if [[ $command == rallyctl ]]; then
        if ((index == last)); then
            _rallypoint_words "$_rallypoint_verbs --help --version" "" "$typed"
            return
        fi
        command="rallyctl ${words[index]}"
        ((index += 1))
    fi
    _rallypoint_flags "$command"
    for (( ; index < last; index++)); do
        _rallypoint_pass "${words[index]}" || break
    done
    if ((index < last)); then
        _rallypoint_rest "$index"
    elif [[ -n $flag ]]; then
        _rallypoint_flag "$command $flag" && _rallypoint_value "" "$typed"
    elif [[ -z $ended && $typed == --*=* ]]; then
        flag=${typed%%=*}
        _rallypoint_flag "$command ${flag//_/-}" && _rallypoint_value "$flag=" "${typed#*=}"
    elif [[ -z $ended && $typed == -* ]]; then
        _rallypoint_names_of_flags
    else
        _rallypoint_operand "$command $operand" && _rallypoint_value "" "$typed"
    fi
}

# Notes what a word before the cursor means; false where it begins what is another's to complete.
_rallypoint_pass() {
    local word=$1
    if [[ -n $flag ]]; then
        _rallypoint_note "$flag" "$word"
        flag=''
    elif [[ -n $ended || $word != -?* ]]; then
        _rallypoint_operand "$command $operand"
        [[ $kind != script && $kind != command ]] || return 1
        ((operand += 1))
    elif [[ $word == -- ]]; then
        ended=yes
    elif [[ $word == --*=* ]]; then
        flag=${word%%=*}
        _rallypoint_note "${flag//_/-}" "${word#*=}"
        flag=''
    else
        word=${word//_/-}
        _rallypoint_note "$word" ""
        # One that takes a value, also where it is abbreviated.
        if [[ " $short " == *" $word "* || " $flags" == *" $word="* ]] || [[ $word == --* && " $flags" =~ " $word"[a-z-]*= ]]; then
            flag=$word
        fi
    fi
}

# Remembers what a flag says of the words that follow.
_rallypoint_note() {
    case $1 in
        --hosts) hosts=$2 ;;
        --hostfile) hostfile=$2 ;;
        -m | --module) runs=module ;;
        --no-python) runs=program ;;
    esac
}

# Completes what follows words[$1]: a script, whose arguments may be files, or a command line of its own.
_rallypoint_rest() {
    local name=${words[$1]##*/}
    if [[ $kind == command && ($name == rallyrun || $name == rallyctl) ]]; then
        _rallypoint_line "$1"
    else
        kind=file known='' separator=''
        _rallypoint_value "" "$typed"
    fi
}

# Flags as they are being written, with dashes or with torchrun's underscores.
_rallypoint_names_of_flags() {
    if [[ $typed == --*_* ]]; then
        flags=${flags//-/_}
        flags=" $flags"
        flags=${flags// __/ --}
    fi
    _rallypoint_words "$flags" "" "$typed"
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
}

# What can stand for a value: names of $kind, the words $known, several with $separator between them. $1 stands before
# it, and $2 has been typed.
_rallypoint_value() {
    local before=$1 typed=$2
    if [[ -n $separator && $typed == *"$separator"* ]]; then
        before+=${typed%"$separator"*}$separator
        typed=${typed##*"$separator"}
    fi
    _rallypoint_words "$known" "$before" "$typed"
    [[ -n $separator || $known == *[=:] ]] && compopt -o nospace 2>/dev/null
    if [[ $typed == jsonl:* ]]; then
        before+=jsonl: typed=${typed#jsonl:} kind=file
    fi
    case $kind in
        file) _rallypoint_find -f ;;
        folder) _rallypoint_find -d ;;
        host) _rallypoint_words "$(_rallypoint_hosts)" "$before" "$typed" ;;
        variable) _rallypoint_find -e ;;
        interface) _rallypoint_words "$(cd /sys/class/net 2>/dev/null && printf '%s\n' *)" "$before" "$typed" ;;
        program | command) _rallypoint_programs ;;
        script)
            case $runs in
                module) _rallypoint_modules ;;
                program) _rallypoint_programs ;;
                *) _rallypoint_find -d; _rallypoint_find -f -X '!*.py' ;;
            esac
            ;;
    esac
}

# The words of $1 that begin with $3, with $2 before them.
_rallypoint_words() {
    local word list
    read -r -d '' -a list <<< "$1"
    for word in ${list[@]+"${list[@]}"}; do
        [[ $word == "$3"* ]] && COMPREPLY+=("$2$word")
    done
}

# What `compgen $@` finds that begins with $typed, after $before.
_rallypoint_find() {
    local found
    [[ $1 == -[df] ]] && compopt -o filenames 2>/dev/null
    while IFS= read -r found; do
        COMPREPLY+=("$before$found")
    done < <(compgen "$@" -- "${typed//\\/}")
}

# Programs, of which there are too many to name where nothing has been typed.
_rallypoint_programs() {
    if [[ $typed == */* ]]; then
        _rallypoint_find -f
    elif [[ -n $typed ]]; then
        _rallypoint_find -c
    fi
}

# Modules below this folder, as python -m takes them.
_rallypoint_modules() {
    local path
    while IFS= read -r path; do
        if [[ -d $path && ${path##*/} != [._]* ]]; then
            COMPREPLY+=("${path//\//.}.")
            compopt -o nospace 2>/dev/null
        elif [[ $path == *.py ]]; then
            path=${path%.py}
            COMPREPLY+=("${path//\//.}")
        fi
    done < <(compgen -f -- "${typed//.//}")
}

# Hosts: those of --hosts or --hostfile of this line, else of files that have hostfiles' names, of ssh and /etc/hosts.
_rallypoint_hosts() {
    local file
    if [[ -n $hosts ]]; then
        tr , '\n' <<< "$hosts" | _rallypoint_first_words
    elif [[ -n $hostfile ]]; then
        _rallypoint_first_words < "${hostfile/#\~\//$HOME/}"
    else
        for file in hostfile hostfile.* *.hostfile hosts hosts.txt /job/hostfile ~/.ssh/known_hosts; do
            [[ -f $file && -r $file ]] && _rallypoint_first_words < "$file"
        done
        compgen -A hostname
    fi 2>/dev/null
}

# The first word of each line, without a number of slots.
_rallypoint_first_words() {
    local name rest
    while IFS=$' \t\r,' read -r name rest || [[ -n $name ]]; do
        name=${name%%'#'*}
        case $name in
            '' | '|'* | @*) continue ;; # hashed names and marks of known_hosts
            \[*\]:* | *[!:]:[0-9]*) name=${name%:*} ;;
        esac
        printf '%s\n' "$name"
    done
}

complete -F _rallypoint rallyrun rallyctl
