import '@mantine/core/styles/Menu.css'
import { Button, Menu, TextInput } from '@mantine/core'
import { useState, type ReactElement } from 'react'
import { useNavigate } from 'react-router'

import { viewsOf, withView, type SavedView } from '../model/jobs'
import { DIALOGS } from '../words/dialogs'
import { JOBS } from '../words/jobs'
import { Form } from './Basics'
import { Dialog } from './Dialog'

const KEY = 'everstep-job-views'
const read = (): SavedView[] => viewsOf(localStorage.getItem(KEY))
const write = (views: readonly SavedView[]) => localStorage.setItem(KEY, JSON.stringify(views))

interface Props {
  search: URLSearchParams
  onClose: () => void
  children: ReactElement
}

/** Opens, saves and deletes views of the list of jobs. This browser stores them. */
export default function ViewsMenu({ search, onClose, children }: Props) {
  const navigate = useNavigate()
  const [views, setViews] = useState(read)
  const [isSaving, setSaving] = useState(false)
  const change = (next: SavedView[]) => {
    write(next)
    setViews(next)
  }
  const words = JOBS.menus
  if (isSaving) {
    return (
      <>
        {children}
        <SaveDialog
          onClose={onClose}
          onSave={(name) => change(withView(read(), { name, search: search.toString() }))}
        />
      </>
    )
  }
  return (
    <Menu opened position="bottom-end" withinPortal closeOnItemClick={false} onClose={onClose}>
      <Menu.Target>{children}</Menu.Target>
      <Menu.Dropdown>
        <Menu.Label>{words.savedViews}</Menu.Label>
        {!views.length && <Menu.Item disabled>{words.noViews}</Menu.Item>}
        {views.map((view) => (
          <div key={view.name} className="row between saved">
            <Menu.Item
              onClick={() => {
                void navigate({ search: view.search })
                onClose()
              }}
            >
              {view.name}
            </Menu.Item>
            <Menu.Item
              w="auto"
              aria-label={words.remove(view.name)}
              onClick={() => change(read().filter(({ name }) => name !== view.name))}
            >
              ✕
            </Menu.Item>
          </div>
        ))}
        <Menu.Divider />
        <Menu.Item onClick={() => setSaving(true)}>{words.save}</Menu.Item>
      </Menu.Dropdown>
    </Menu>
  )
}

function SaveDialog({ onClose, onSave }: { onClose: () => void; onSave: (name: string) => void }) {
  const [name, setName] = useState('')
  const words = JOBS.menus
  const save = () => {
    if (!name.trim()) return
    onSave(name.trim())
    onClose()
  }
  return (
    <Dialog title={words.saveTitle} onClose={onClose}>
      <Form className="stack" onSubmit={save}>
        <TextInput
          label={words.name}
          description={words.saveText}
          value={name}
          maxLength={60}
          data-autofocus
          autoComplete="off"
          onChange={(event) => setName(event.currentTarget.value)}
        />
        <div className="row end">
          <Button variant="default" onClick={onClose}>
            {DIALOGS.cancel}
          </Button>
          <Button type="submit" disabled={!name.trim()}>
            {words.confirm}
          </Button>
        </div>
      </Form>
    </Dialog>
  )
}
