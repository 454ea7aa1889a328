/** Notes of people about an incident or a job, and the field that adds one. */
import { Button, Textarea } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useRef, useState } from 'react'

import type { Note } from '../contract'
import { useRole } from '../api/queries'
import { NOTES } from '../words/incident'
import { Ago, Problem } from './Basics'

const MAX_CHARACTERS = 4096

interface Props {
  /** Oldest first. */
  notes: readonly Note[]
  /** Stores a note. Calls with the same token store one note. */
  create: (text: string, token: string) => Promise<unknown>
}

/** A token that no other note has. `crypto.randomUUID` needs HTTPS, which a dashboard on a private network may lack. */
const newToken = (): string =>
  Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(16)).join('')

export function Notes({ notes, create }: Props) {
  const { mayRun } = useRole()
  return (
    <>
      {notes.length === 0 ? (
        <p className="dim">{NOTES.none}</p>
      ) : (
        <ul className="plain notes">
          {notes.map((note) => (
            <li key={note.NoteId}>
              <div className="dim">
                {note.Author}, <Ago at={note.CreationTime} />
              </div>
              <p className="text">{note.Text}</p>
            </li>
          ))}
        </ul>
      )}
      {mayRun && <NewNote create={create} />}
    </>
  )
}

function NewNote({ create }: Pick<Props, 'create'>) {
  const client = useQueryClient()
  const [text, setText] = useState('')
  const token = useRef(newToken())
  const request = useMutation({
    mutationFn: () => create(text.trim(), token.current),
    onSuccess: () => {
      setText('')
      token.current = newToken()
      return client.invalidateQueries()
    },
  })
  return (
    <div className="stack tight">
      <Textarea
        aria-label={NOTES.label}
        placeholder={NOTES.placeholder}
        autosize
        minRows={2}
        maxRows={8}
        maxLength={MAX_CHARACTERS}
        value={text}
        onChange={(event) => {
          setText(event.currentTarget.value)
          token.current = newToken()
        }}
      />
      <div className="row end">
        <Button
          size="xs"
          variant="default"
          disabled={!text.trim()}
          loading={request.isPending}
          onClick={() => request.mutate()}
        >
          {NOTES.add}
        </Button>
      </div>
      {request.error && <Problem error={request.error} title={NOTES.failed} />}
    </div>
  )
}
