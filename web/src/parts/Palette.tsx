/** The search box: opens every page and object by name, and runs actions. */
import '@mantine/core/styles/ModalBase.css'
import '@mantine/core/styles/Modal.css'
import { Modal, TextInput, useMantineColorScheme } from '@mantine/core'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useEffect, useMemo, useState } from 'react'
import { useNavigate } from 'react-router'

import { call } from '../api/client'
import { fleetsQuery, incidentsQuery, jobsQuery, nodesQuery, useRole } from '../api/queries'
import { entriesOf, matching, type Action, type Entry } from '../model/palette'
import { DIALOGS } from '../words/dialogs'
import { JOBS } from '../words/jobs'
import { PALETTE } from '../words/palette'
import { Problem } from './Basics'
import ConfirmDialog from './ConfirmDialog'
import NodeDialog from './NodeDialog'

const MOST = 12

interface Props {
  text: string
  /** Whether Enter was pressed. If no list has arrived yet, the first result opens as soon as one exists. */
  isEntered: boolean
  onType: (text: string) => void
  onEnter: () => void
  onClose: () => void
  onShowKeys: () => void
  onSignOut: () => void
}

export default function Palette({ text, isEntered, onType, onEnter, onClose, onShowKeys, onSignOut }: Props) {
  const navigate = useNavigate()
  const client = useQueryClient()
  const { setColorScheme } = useMantineColorScheme()
  const [chosen, setChosen] = useState(0)
  const [asked, setAsked] = useState<Action>()
  const [error, setError] = useState<unknown>()
  const { mayRun, isAdmin } = useRole()
  const lists = [
    useQuery({ ...jobsQuery, refetchInterval: false }),
    useQuery({ ...incidentsQuery(), refetchInterval: false }),
    useQuery({ ...fleetsQuery, refetchInterval: false }),
  ] as const
  const isAboutNodes = /\b(i-|drain|node)/i.test(text)
  const nodes = useQuery({ ...nodesQuery(), refetchInterval: false, enabled: isAboutNodes }).data
  const [{ data: jobs }, { data: incidents }, { data: fleets }] = lists
  // Enter waits only for the first answers since this box was opened, and not for the answers of later polls.
  const isSearching = lists.some((list) => list.isFetching && !list.isFetchedAfterMount)
  const entries = useMemo(
    () =>
      entriesOf(
        { jobs: jobs ?? [], fleets: fleets ?? [], incidents: incidents ?? [], nodes: nodes ?? [] },
        { mayRun, isAdmin },
      ),
    [jobs, incidents, fleets, nodes, mayRun, isAdmin],
  )
  const found = matching(entries, text, MOST)
  const index = Math.min(chosen, Math.max(0, found.length - 1))

  const change = (operation: 'PauseTrainingJob' | 'ResumeTrainingJob', run: string, address: string) => {
    call(operation, { TrainingJobName: run }).then(() => {
      void client.invalidateQueries()
      onClose()
      void navigate(`/jobs/${encodeURIComponent(address)}`)
    }, setError)
  }
  const run = (action: Action) => {
    switch (action.type) {
      case 'pause':
        return change('PauseTrainingJob', action.job.RunId, action.address)
      case 'resume':
        return change('ResumeTrainingJob', action.job.RunId, action.address)
      case 'stop':
      case 'drain':
        return setAsked(action)
      case 'theme':
        setColorScheme(action.scheme)
        return onClose()
      case 'keys':
        return onShowKeys()
      case 'sign-out':
        onClose()
        return onSignOut()
    }
  }
  const open = (entry: Entry) => {
    if (entry.action) return run(entry.action)
    onClose()
    void navigate(entry.to)
  }
  useEffect(() => {
    if (!isEntered) return
    const entry = found[index]
    if (!entry && isSearching) return
    onType(text) // clears `isEntered`, so that one press of Enter opens one entry
    if (entry) open(entry)
  })

  if (asked?.type === 'drain') return <NodeDialog node={asked.node} operation="DrainNode" onClose={onClose} />
  if (asked?.type === 'stop') {
    return (
      <ConfirmDialog
        name={asked.job.TrainingJobName}
        verb={JOBS.stopDialog.verb}
        onClose={onClose}
        onConfirm={async () => {
          await call('StopTrainingJob', { TrainingJobName: asked.job.RunId })
          void navigate(`/jobs/${encodeURIComponent(asked.address)}`)
        }}
      >
        <p>{JOBS.stopDialog.effect}</p>
      </ConfirmDialog>
    )
  }
  return (
    <Modal
      opened
      onClose={onClose}
      withCloseButton={false}
      padding="xs"
      yOffset="12vh"
      attributes={{ content: { 'aria-label': PALETTE.label } }}
    >
      <TextInput
        aria-label={PALETTE.label}
        placeholder={PALETTE.placeholder}
        value={text}
        data-autofocus
        role="combobox"
        aria-expanded="true"
        aria-controls="palette"
        aria-activedescendant={found.length ? `palette-${index}` : undefined}
        onChange={(event) => {
          onType(event.currentTarget.value)
          setChosen(0)
        }}
        onKeyDown={(event) => {
          const move = event.key === 'ArrowDown' ? 1 : event.key === 'ArrowUp' ? -1 : 0
          if (move) {
            event.preventDefault()
            setChosen((index + move + found.length) % Math.max(1, found.length))
          } else if (event.key === 'Enter') {
            event.preventDefault() // the element that has the focus after this box closes would receive the key
            onEnter()
          }
        }}
      />
      <ul className="palette" id="palette" role="listbox" aria-label={PALETTE.found}>
        {found.map((entry, place) => (
          <li
            key={entry.id}
            id={`palette-${place}`}
            role="option"
            aria-selected={place === index}
            onClick={() => open(entry)}
            onPointerMove={() => setChosen(place)}
          >
            <span>{entry.label}</span>
            <span className="dim">{entry.kind}</span>
          </li>
        ))}
      </ul>
      <p className="dim" role="status">
        {found.length ? null : isSearching ? PALETTE.searching : noneText(lists.every((list) => list.data))}
      </p>
      {error !== undefined && <Problem error={error} title={DIALOGS.failed} />}
    </Modal>
  )
}

const noneText = (isComplete: boolean): string => (isComplete ? PALETTE.none : PALETTE.incomplete)
